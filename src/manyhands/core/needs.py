"""What a sync method needs of what it runs on. A parallel mode and a job say what they offer; neither names methods."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Need:
    """Something that a method can't do without."""

    reason: str  # why a method can't be taken where this isn't offered; its name stands before
    option: str  # the key of the option that decides whether it is offered
    mend: tuple[str, ...] = ()  # what to do, besides taking another method
    short: str = ""  # the reason where there is little room


MODE = "parallel.mode"
# What parallel modes offer.
WHOLE_GRADIENTS = Need("needs the whole network, with its gradients, on each process", MODE)
OWN_AVERAGE = Need("replaces gradient averaging, which this mode doesn't allow", MODE)
AVERAGE_HOOK = Need("needs a hook in gradient averaging, which this mode doesn't have", MODE)
# What jobs offer.
OWN_STATISTICS = Need(
    "can't normalise over the global batch, because each process makes its own updates",
    "train.norm_group",
    ("remove train.norm_group",),
    "not with a global norm_group",
)
FINITE_GRADIENTS = Need(
    "doesn't support fp16, because fp16 gradients may overflow",
    "sync.method",
    ("set --train.precision bf16",),
    "not with fp16",
)


class HasGradients(Protocol):
    """A network whose gradients a sync method can reach, such as any Module of torch."""

    def named_parameters(self) -> "Iterator[tuple[str, nn.Parameter]]":
        """All parameters, whole, by the user's own names."""
        ...

    def buffers(self) -> "Iterator[Tensor]":
        """BatchNorm's statistics and other buffers."""
        ...


def missing(needs: Iterable[Need], offers: Iterable[Need]) -> Need | None:
    """The first need that isn't offered."""
    there = set(offers)
    return next((need for need in needs if need not in there), None)
