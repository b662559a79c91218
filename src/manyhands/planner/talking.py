"""What an all-reduce costs a process's own cores, timed between two threads of this process over loopback.

On a CPU the cores that compute also add up, copy and pass bytes to the network. That part of an all-reduce hides
behind nothing; the rest is waiting, behind which the backward pass goes on.
"""

import datetime
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from manyhands.sync.link_speeds import LinkSpeed, rounds

_PARTIES = 2
_SMALL, _LARGE = 1 << 10, 1 << 24
_REPEATS_SMALL, _REPEATS_LARGE, _ROUNDS = 32, 2, 3
_TIMEOUT = datetime.timedelta(seconds=60)


def work_of_sums(cores: float) -> LinkSpeed:
    """A link of which only the work is known: a process's seconds on so many cores, by byte sent and by message.

    DDP puts each gradient into a bucket before, which is one more pass over memory.
    """
    threads = torch.get_num_threads()
    # More than one would spin while they wait for each other, which counts as work.
    torch.set_num_threads(1)
    try:
        groups = _pair()
        small_s = statistics.median(_processor_seconds(groups, _SMALL, _REPEATS_SMALL) for _ in range(_ROUNDS))
        large_s = statistics.median(_processor_seconds(groups, _LARGE, _REPEATS_LARGE) for _ in range(_ROUNDS))
    finally:
        torch.set_num_threads(threads)
    messages, share = rounds("all_reduce", _PARTIES)
    by_byte = max(0.0, large_s - small_s) / (share * (_LARGE - _SMALL)) / cores
    return LinkSpeed(float("inf"), 0.0, by_byte, small_s / messages / cores)


# torch's types know neither the options nor the collectives of the class.
_Gloo: Any = dist.ProcessGroupGloo


def _pair() -> list[Any]:
    store = dist.HashStore()
    made: dict[int, Any] = {}

    def make(rank: int) -> None:
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        made[rank] = _Gloo(store, rank, _PARTIES, options)

    _together(make)
    return [made[rank] for rank in range(_PARTIES)]


def _processor_seconds(groups: list[Any], size: int, repeats: int) -> float:
    """Of one process in one all-reduce of so many bytes."""
    tensors = [torch.zeros(size // 4) for _ in groups]
    buckets = [torch.zeros(size // 4) for _ in groups]

    def sum_up(rank: int) -> None:
        for _ in range(repeats):
            buckets[rank].copy_(tensors[rank])
            groups[rank].allreduce([buckets[rank]]).wait()

    _together(sum_up)
    began = time.process_time()
    _together(sum_up)
    return (time.process_time() - began) / repeats / len(groups)


def _together(run: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(_PARTIES) as pool:
        list(pool.map(run, range(_PARTIES)))
