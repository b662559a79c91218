"""Measures the network link between the processes of a process group."""

import statistics
import time

import torch
import torch.distributed as dist

from manyhands.core.devices import wait_for_device
from manyhands.sync.link_speeds import LinkSpeed, fit_link_speed

_REPEATS = 5
_SMALLEST_BYTES, _LARGEST_BYTES = 1 << 14, 1 << 26
_LONG_S = 0.3  # long enough to measure the bandwidth
_VALUE_BYTES = 4


def measure_link(group: dist.ProcessGroup | None, device: str, budget_s: float = 5.0) -> LinkSpeed:
    """Measures latency and bandwidth on the slowest process. Returns the same result on all. A collective.

    All-reduces of one value measure the latency. For the bandwidth, sizes double until an all-reduce takes over 0.3 s.
    The last size runs twice, and the faster time counts. A size is tried only if the budget allows twice the last time.
    """
    processes = dist.get_world_size(group) if dist.is_initialized() else 1
    if processes == 1:
        return LinkSpeed(float("inf"), 0.0)
    ends_s = time.perf_counter() + budget_s
    _all_reduce_seconds(1, group, device)
    small_s = statistics.median(_all_reduce_seconds(1, group, device) for _ in range(_REPEATS))
    size, taken_s = _SMALLEST_BYTES, _all_reduce_seconds(_SMALLEST_BYTES // _VALUE_BYTES, group, device)
    while taken_s <= _LONG_S and size < _LARGEST_BYTES and _has_time_left(2 * taken_s, ends_s, group, device):
        size *= 2
        taken_s = _all_reduce_seconds(size // _VALUE_BYTES, group, device)
    if _has_time_left(taken_s, ends_s, group, device):
        taken_s = min(taken_s, _all_reduce_seconds(size // _VALUE_BYTES, group, device))
    return fit_link_speed("all_reduce", processes, ((_VALUE_BYTES, small_s), (size, taken_s)))


def _has_time_left(wanted_s: float, ends_s: float, group: dist.ProcessGroup | None, device: str) -> bool:
    return _max_over_ranks(time.perf_counter() + wanted_s - ends_s, group, device) <= 0


def pass_seconds(count: int, device: str) -> float:
    """Measures the seconds of one addition of two vectors of `count` values, the unit of compression work."""
    one, other, total = (torch.ones(count, device=device) for _ in range(3))
    taken: list[float] = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        torch.add(one, other, out=total)
        wait_for_device(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _all_reduce_seconds(count: int, group: dist.ProcessGroup | None, device: str) -> float:
    """Returns the seconds of one all-reduce on the slowest process. A collective."""
    values = torch.zeros(count, device=device)
    # All processes start together; otherwise the first would measure the delay of the others.
    _max_over_ranks(0.0, group, device)
    start = time.perf_counter()
    dist.all_reduce(values, group=group)
    wait_for_device(device)
    return _max_over_ranks(time.perf_counter() - start, group, device)


def _max_over_ranks(value: float, group: dist.ProcessGroup | None, device: str) -> float:
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return float(largest)
