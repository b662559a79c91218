"""Adds up the gradients of a split network: each parameter's over exactly the axes where it is a term of a sum."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.layouts import TensorLayout
from manyhands.parallel.grid import Grid

# As many bytes as DDP puts into one message: few enough to begin while backward goes on.
BUCKET_BYTES = 25 * 1024 * 1024


class Bucket:
    """Gradients that go in one message.

    Attributes:
        axes: numbers of the mesh's axes over which they are summed.
        parameters: whose gradients they are.
    """

    def __init__(self, axes: tuple[int, ...], parameters: list[nn.Parameter]) -> None:
        self.axes, self.parameters = axes, parameters
        self.waiting = len(parameters)
        self.flat: Tensor | None = None
        self.work: Any = None


class Reducer:
    """Sends gradients while backward goes on, bucket after bucket in an order that is the same everywhere.

    Args:
        parameters: by name, in the network's order.
        layouts: of each; `gradient_axes` says over which axes its gradient is summed.
        grid: the processes.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, TensorLayout], grid: Grid) -> None:
        self._grid = grid
        self._held_back = False
        self.buckets = _fill(parameters, layouts, grid)
        self._next = 0
        self._of = {id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrived)
            for bucket in self.buckets
            for parameter in bucket.parameters
        ]

    @contextmanager
    def hold_back(self) -> Iterator[None]:
        """Backward in this context adds gradients up on each process alone."""
        self._held_back = True
        try:
            yield
        finally:
            self._held_back = False

    def finish(self) -> None:
        """Sends what has not been sent, waits for all, and puts the sums in place; after an update's last backward."""
        while self._next < len(self.buckets):
            self._send()
        for bucket in self.buckets:
            bucket.work.wait()
            flat: Any = bucket.flat
            sizes = [parameter.numel() for parameter in bucket.parameters]
            for parameter, piece in zip(bucket.parameters, flat.split(sizes), strict=True):
                _gradient(parameter).copy_(piece.view(parameter.shape))
            bucket.flat, bucket.work, bucket.waiting = None, None, len(bucket.parameters)
        self._next = 0

    def release(self) -> None:
        """Lets go of the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: Tensor) -> None:
        if self._held_back:
            return
        self._of[id(parameter)].waiting -= 1
        # Messages go in the buckets' order on every process, whichever is complete first.
        while self._next < len(self.buckets) and self.buckets[self._next].waiting <= 0:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket.parameters])
        bucket.work = dist.all_reduce(bucket.flat, group=self._grid.group(bucket.axes), async_op=True)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient; zeros for a parameter that this process did not use."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _fill(parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, TensorLayout], grid: Grid) -> list[Bucket]:
    """Buckets of one axis set and dtype each, the last layers' first, since their gradients come first."""
    open_buckets: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    found: list[Bucket] = []
    for name, parameter in reversed(list(parameters.items())):
        axes = tuple(axis for axis in layouts[name].gradient_axes if grid.mesh.sizes[axis] > 1)
        if not axes or not parameter.requires_grad:
            continue
        filling = open_buckets.setdefault((axes, parameter.dtype), [])
        filling.append(parameter)
        if sum(one.numel() * one.element_size() for one in filling) >= BUCKET_BYTES:
            found.append(Bucket(axes, open_buckets.pop((axes, parameter.dtype))))
    found += [Bucket(axes, filling) for (axes, _), filling in open_buckets.items()]
    return found


def total_norm(parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, TensorLayout], grid: Grid) -> Tensor:
    """The 2-norm [] of all gradients of the whole network, the same on every process."""
    squares: dict[tuple[int, ...], list[Tensor]] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            cut = tuple(sorted(axis for axis in layouts[name].cut_axes if grid.mesh.sizes[axis] > 1))
            squares.setdefault(cut, []).append(torch.linalg.vector_norm(parameter.grad) ** 2)
    total = torch.zeros((), device=grid.world.device)
    for cut in sorted(squares):
        part = torch.stack(squares[cut]).sum()
        if cut:
            dist.all_reduce(part, group=grid.group(cut))
        total = total + part
    return total.sqrt()
