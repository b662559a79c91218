"""Measures the link between the processes of a live group."""

import statistics
import time

import torch
import torch.distributed as dist

from manyhands.core.links import Link, fitted_link

_REPEATS = 5
_SMALLEST_BYTES, _LARGEST_BYTES = 1 << 14, 1 << 26
# A message that takes this long says enough of the bandwidth.
_LONG_S = 0.3
_VALUE_BYTES = 4


def measure_link(group: dist.ProcessGroup | None, device: str, budget_s: float = 5.0) -> Link:
    """Latency and bandwidth of the slowest process; a collective, and all of the group get the same numbers.

    All-reduces of one value give the latency, and of doubling sizes the bandwidth, until one takes long.

    Args:
        group: whose processes all call this alike; None for all of the run. One process needs no link.
        device: where the tensors lie.
        budget_s: a larger size is tried only where twice the last one's time is left of this.
    """
    processes = dist.get_world_size(group) if dist.is_initialized() else 1
    if processes == 1:
        return Link(float("inf"), 0.0)
    began = time.perf_counter()
    _seconds(1, group, device)
    small_s = statistics.median(_seconds(1, group, device) for _ in range(_REPEATS))
    points = [(float(_VALUE_BYTES), small_s)]
    size = _SMALLEST_BYTES
    while size <= _LARGEST_BYTES:
        taken_s = _seconds(size // _VALUE_BYTES, group, device)
        points.append((float(size), taken_s))
        left_s = budget_s - _largest(time.perf_counter() - began, group, device)
        if taken_s > _LONG_S or left_s < 2 * taken_s:
            break
        size *= 2
    return fitted_link("all_reduce", processes, tuple(points))


def _seconds(count: int, group: dist.ProcessGroup | None, device: str) -> float:
    """Of one all-reduce, on the slowest process."""
    values = torch.zeros(count, device=device)
    # All begin together, or the first would count the others' delay.
    _largest(0.0, group, device)
    start = time.perf_counter()
    dist.all_reduce(values, group=group)
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)
    return _largest(time.perf_counter() - start, group, device)


def _largest(value: float, group: dist.ProcessGroup | None, device: str) -> float:
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return float(largest)
