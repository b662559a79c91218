"""What a loop of one's own iterates over."""

from collections.abc import Callable, Iterator

from torch import Tensor

from manyhands.data.order import Order


class SessionSamples:
    """Iterates over this process's micro-batches of the session's current epoch."""

    def __init__(self, batches: Callable[[], Iterator[tuple[Tensor, Tensor]]], order: Order) -> None:
        self._batches, self._order = batches, order

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches()

    def __len__(self) -> int:
        """Returns the number of updates in an epoch."""
        return self._order.steps_per_epoch
