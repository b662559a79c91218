"""Measures collectives along the axes of a mesh on the live group of processes."""

import itertools
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core.devices import wait_for
from manyhands.core.link_speeds import Points
from manyhands.core.mesh import Mesh

SIZES_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
USED_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_REPEATS = 3


def axis_sets(mesh: Mesh) -> list[tuple[int, ...]]:
    """All sets of the mesh's axes along which more than one process lies."""
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    return [group for count in range(1, len(axes) + 1) for group in itertools.combinations(axes, count)]


def measure_collectives(
    groups: Mapping[tuple[int, ...], Any],
    device: str = "cpu",
    kinds: Collection[str] = USED_KINDS,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    budget_s: float = 20.0,
) -> dict[tuple[str, tuple[int, ...]], Points]:
    """Times collectives of several sizes; all processes of the run call it alike, and all get the same numbers.

    Groups are this process's along each set of axes, in the same order everywhere; sizes are whole tensors', ascending.
    Once the budget is used up larger ones are left out, though each collective is timed once at least. Gives points
    (bytes, seconds) by (kind, axes): the median of some repeats on the slowest process.
    """
    began = time.perf_counter()
    found: dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]] = {}
    for size, (axes, group), kind in itertools.product(sizes_bytes, groups.items(), kinds):
        points = found.setdefault((kind, axes), [])
        used_s = _largest(time.perf_counter() - began, device)
        # The time left differs from process to process; the largest is the same for all, so all stop at one place.
        if points and used_s > budget_s:
            continue
        processes = dist.get_world_size(group)
        count = max(1, size // 4 // processes) * processes
        points.append((4.0 * count, _largest(_median_seconds(_collective(kind, count, group, device), device), device)))
    return {key: tuple(points) for key, points in found.items()}


def _largest(value: float, device: str) -> float:
    largest = torch.tensor(value, dtype=torch.float64 if device != "mps" else torch.float32, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _collective(kind: str, count: int, group: Any, device: str) -> Callable[[], object]:
    processes = dist.get_world_size(group)
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // processes, device=device)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, src=first, group=group),
    }
    return calls[kind]


def _median_seconds(run: Callable[[], object], device: str) -> float:
    taken: list[float] = []
    for repeat in range(_REPEATS + 1):
        # All begin together, or the first would count the others' delay.
        _meet(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        if repeat:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _meet(device: str) -> None:
    signal: Tensor = torch.zeros(1, device=device)
    dist.all_reduce(signal)
    signal.item()
