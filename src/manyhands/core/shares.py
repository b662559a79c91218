"""The share of a process in a micro-batch, from `data.order` to the network."""

from dataclasses import dataclass

from manyhands.core.errors import UserError


@dataclass(frozen=True)
class Span:
    """The part of a BatchNorm group that a process holds."""

    group: int  # number of the group within the pass
    start: int  # first row in the process's own batch
    stop: int  # row after the last one
    size: int  # samples in the whole group, over all processes
    shared: int  # index in the list of groups that several processes hold, or -1 for a group of this process alone
    first: bool  # True on the process that holds the group's first sample


@dataclass(frozen=True)
class Share:
    """The samples of a process in a micro-batch."""

    start: int  # first sample, counted within the global batch
    stop: int  # sample after the last one; equal to start for a process without samples
    spans: tuple[Span, ...]  # the BatchNorm groups it holds, in order
    # sizes of the groups of this micro-batch that several processes hold; equal on all processes
    shared_groups: tuple[int, ...]

    @property
    def count(self) -> int:
        """Samples in this share."""
        return self.stop - self.start


def check_batch(batch: int, processes: int) -> None:
    """Raises UserError if an update has fewer samples than processes."""
    if batch < processes:
        what = f"train.batch ({batch}) is smaller than the number of processes ({processes})"
        raise UserError(what, "train.batch", (f"set --batch {processes} or higher", "or use fewer processes"))
