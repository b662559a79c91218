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
OWN_AVERAGE = Need("averages gradients in its own way, which this mode leaves to nobody", MODE)
AVERAGE_HOOK = Need("changes gradients within the mode's own average, which this mode doesn't let anybody do", MODE)
# What jobs offer.
OWN_STATISTICS = Need(
    "has no global batch to normalise over: each process takes its own samples",
    "train.norm_group",
    ("leave norm_group out",),
    "not with a global norm_group",
)
FINITE_GRADIENTS = Need(
    "doesn't go with fp16, whose gradients may overflow",
    "sync.method",
    ("--train.precision bf16",),
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
