"""Times all-reduces on the live group of processes."""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from manyhands.core.devices import wait_for
from manyhands.sync.link_speeds import Points

SIZES_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
_REPEATS = 3


def measure_all_reduce(device: str = "cpu", sizes_bytes: Sequence[int] = SIZES_BYTES, budget_s: float = 20.0) -> Points:
    """Times all-reduces of ascending sizes over all processes, which must call this together.

    Each size is timed `_REPEATS` times; larger sizes are left out once the budget is used up, except the first.

    Returns:
        Points (bytes, seconds), the same on all processes: the median of the repeats on the slowest process.
    """
    began = time.perf_counter()
    points: list[tuple[float, float]] = []
    for size in sizes_bytes:
        # The time left differs from process to process; the largest is the same for all, so all stop at one place.
        used_s = _largest(time.perf_counter() - began, device)
        if points and used_s > budget_s:
            break
        count = max(1, size // 4)
        points.append((4.0 * count, _largest(_median_seconds(torch.zeros(count, device=device)), device)))
    return tuple(points)


def _largest(value: float, device: str) -> float:
    largest = torch.tensor(value, dtype=torch.float64 if device != "mps" else torch.float32, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _median_seconds(tensor: torch.Tensor) -> float:
    taken: list[float] = []
    for repeat in range(_REPEATS + 1):
        # All begin together, or the first would count the others' delay.
        signal = torch.zeros(1, device=tensor.device)
        dist.all_reduce(signal)
        signal.item()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        wait_for(str(tensor.device))
        if repeat:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)
