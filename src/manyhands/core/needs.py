"""Requirements of gradient synchronization methods. Parallel modes and jobs list the requirements that they meet."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Need:
    """A requirement of a gradient synchronization method."""

    reason: str  # the end of an error message that begins with the method's name
    option: str  # key of the option that decides whether the requirement is fulfilled
    hints: tuple[str, ...] = ()  # further hints; the first is always to choose another method
    short: str = ""  # a short form of the reason for tables


MODE = "parallel.mode"
# Offered by parallel modes.
WHOLE_GRADIENTS = Need("needs a parallel mode that keeps the entire network and its gradients on each process", MODE)
OWN_AVERAGE = Need("needs a parallel mode whose gradient averaging can be replaced", MODE)
AVERAGE_HOOK = Need("needs a parallel mode whose gradient averaging accepts a hook", MODE)
# Offered by jobs.
OWN_STATISTICS = Need(
    "doesn't support train.norm_group=global, because each process normalizes its own samples",
    "train.norm_group", ("remove train.norm_group",), "not with a global norm_group",
)  # fmt: skip
FINITE_GRADIENTS = Need(
    "doesn't support fp16, because fp16 gradients may overflow",
    "sync.method", ("set --train.precision bf16",), "not with fp16",
)  # fmt: skip


class HasGradients(Protocol):
    """A network whose gradients a sync method can access, such as a torch module."""

    def named_parameters(self) -> "Iterator[tuple[str, nn.Parameter]]":
        """Yields (name in the user's network, unsharded parameter) for all parameters."""
        ...

    def buffers(self) -> "Iterator[Tensor]": ...
