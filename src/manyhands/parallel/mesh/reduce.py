"""Sums the gradients of a sharded network over mesh axes along which each process has one term of the sum."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.mesh import Mesh, TensorLayout
from manyhands.parallel.mesh.grid import Grid

BUCKET_BYTES = 25 * 1024 * 1024  # as in DDP: small enough to start during backward


class Bucket:
    """Parameters whose gradients share one all-reduce over mesh axes (indices)."""

    def __init__(self, axes: tuple[int, ...], parameters: list[nn.Parameter]) -> None:
        self.axes, self.parameters, self.waiting = axes, parameters, len(parameters)
        self.flat: Any = None
        self.work: Any = None


class Reducer:
    """All-reduces each gradient over its layout's `gradient_axes` during backward, in equal buckets on all ranks."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, TensorLayout], grid: Grid) -> None:
        self._grid, self._paused, self._next = grid, False, 0
        pieces = [
            (name, gradient_sum_axes(layouts[name], grid.mesh), one.dtype, one.numel() * one.element_size())
            for name, one in parameters.items()
            if one.requires_grad
        ]
        self.buckets = [Bucket(axes, [parameters[name] for name in names]) for axes, names in make_buckets(pieces)]
        self._of = {id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for bucket in self.buckets
            for parameter in bucket.parameters
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def finish(self) -> None:
        """Starts the remaining all-reduces, waits for all, and writes the sums to the gradients. A collective."""
        while self._next < len(self.buckets):
            self._start_all_reduce()
        for bucket in self.buckets:
            bucket.work.wait()
            sizes = [parameter.numel() for parameter in bucket.parameters]
            for parameter, piece in zip(bucket.parameters, bucket.flat.split(sizes), strict=True):
                _gradient(parameter).copy_(piece.view(parameter.shape))
            bucket.flat, bucket.work, bucket.waiting = None, None, len(bucket.parameters)
        self._next = 0

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._paused:
            return
        self._of[id(parameter)].waiting -= 1
        # All processes send buckets in this order, even if a later bucket is complete first.
        while self._next < len(self.buckets) and self.buckets[self._next].waiting <= 0:
            self._start_all_reduce()

    def _start_all_reduce(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket.parameters])
        bucket.work = dist.all_reduce(bucket.flat, group=self._grid.group(bucket.axes), async_op=True)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def gradient_sum_axes(layout: TensorLayout, mesh: Mesh) -> tuple[int, ...]:
    """Returns the indices of the mesh axes, longer than one, over which a parameter's gradient must be summed."""
    return tuple(axis for axis in layout.gradient_axes if mesh.sizes[axis] > 1)


def make_buckets(
    pieces: Sequence[tuple[str, tuple[int, ...], torch.dtype, int]],
) -> list[tuple[tuple[int, ...], list[str]]]:
    """Groups gradients with equal axes and dtype into buckets, starting with the last layer, as backward does.

    `pieces`: (parameter name, axes to sum over, dtype, local bytes) in the network's order. Returns (axes, parameter
    names) of each bucket, in the order of the all-reduces.
    """
    filling: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
    filled_bytes: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    found: list[tuple[tuple[int, ...], list[str]]] = []
    for name, axes, dtype, size_bytes in reversed(pieces):
        if not axes:
            continue
        key = axes, dtype
        filling.setdefault(key, []).append(name)
        filled_bytes[key] = filled_bytes.get(key, 0) + size_bytes
        if filled_bytes[key] >= BUCKET_BYTES:
            found.append((axes, filling.pop(key)))
            del filled_bytes[key]
    return [*found, *((axes, names) for (axes, _), names in filling.items())]


def total_norm(parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, TensorLayout], grid: Grid) -> Tensor:
    """Returns the 2-norm of all gradients of the network, a scalar that is equal on all processes. A collective."""
    squares: dict[tuple[int, ...], list[Tensor]] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            cut = tuple(sorted(axis for axis in layouts[name].sharded_axes if grid.mesh.sizes[axis] > 1))
            squares.setdefault(cut, []).append(torch.linalg.vector_norm(parameter.grad) ** 2)
    total = torch.zeros((), device=grid.world.device)
    for cut in sorted(squares):
        part = torch.stack(squares[cut]).sum()
        if cut:
            dist.all_reduce(part, group=grid.group(cut))
        total = total + part
    return total.sqrt()
