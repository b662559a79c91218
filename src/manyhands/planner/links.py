"""The speeds of links along mesh axes, for the time of collectives, and a measurement of the CPU time they take."""

import datetime
import functools
import statistics
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from manyhands.core.mesh import Mesh
from manyhands.sync.link_speeds import BETWEEN_MACHINES, WITHIN_A_MACHINE, LinkSpeed, link_seconds, rounds, work_seconds


@dataclass(frozen=True)
class MeshLinks:
    """The speeds of the links along all axes of a mesh."""

    mesh: Mesh  # mesh of the processes
    axes: tuple[LinkSpeed, ...]  # link along each axis
    across: tuple[bool, ...]  # by axis, True if it connects machines

    @functools.cached_property
    def alike(self) -> bool:
        return len(set(zip(self.axes, self.across, strict=True))) <= 1

    def seconds(self, kind: str, axes: Collection[int], size_bytes: float) -> float:
        """Returns the seconds of a collective of `size_bytes` that all groups along `axes` run at the same time.

        A group over several axes is as slow as its slowest axis. Between machines, a group shares each
        machine's network interface with the groups of the other processes on that machine.
        """
        axes = tuple(sorted(axes))
        processes = self.mesh.shard_count(axes)
        if processes == 1 or not size_bytes:
            return 0.0
        beside = self.mesh.shard_count(axis for axis, far in enumerate(self.across) if axis not in axes and not far)
        slowest = 0.0
        for axis in axes:
            link = self.axes[axis]
            if self.across[axis]:
                link = replace(link, bytes_per_s=link.bytes_per_s / beside)
            if self.mesh.sizes[axis] > 1:
                slowest = max(slowest, link_seconds(kind, processes, size_bytes, link))
        return slowest

    def work_seconds(self, kind: str, axes: Collection[int], size_bytes: float) -> float:
        """Returns the seconds in which a collective keeps the CPU cores of a process from computing."""
        processes = self.mesh.shard_count(axes)
        if processes == 1 or not size_bytes:
            return 0.0
        return max(work_seconds(kind, processes, size_bytes, self.axes[axis]) for axis in axes)


def mesh_links(
    mesh: Mesh,
    per_machine: int | None = None,
    within: LinkSpeed = WITHIN_A_MACHINE,
    between: LinkSpeed = BETWEEN_MACHINES,
) -> MeshLinks:
    """Returns the links of a mesh with `per_machine` consecutive ranks on each machine (None: one machine)."""
    across: list[bool] = []
    spanned = 1
    for size in reversed(mesh.sizes):
        spanned *= size
        across.insert(0, per_machine is not None and size > 1 and (spanned > per_machine or per_machine % spanned != 0))
    return MeshLinks(mesh, tuple(between if far else within for far in across), tuple(across))


_GROUP_SIZE = 2
_SMALL, _LARGE = 1 << 10, 1 << 24
_REPEATS_SMALL, _REPEATS_LARGE, _ROUNDS = 32, 2, 3
_TIMEOUT = datetime.timedelta(seconds=60)


def all_reduce_cpu_cost(cores: float) -> LinkSpeed:
    """Measures the CPU time of an all-reduce, divided by `cores`. Returns a LinkSpeed with only this cost."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads would spin while waiting for each other
    try:
        groups = _gloo_pair()
        small_s = statistics.median(_cpu_seconds(groups, _SMALL, _REPEATS_SMALL) for _ in range(_ROUNDS))
        large_s = statistics.median(_cpu_seconds(groups, _LARGE, _REPEATS_LARGE) for _ in range(_ROUNDS))
    finally:
        torch.set_num_threads(threads)
    messages, share = rounds("all_reduce", _GROUP_SIZE)
    by_byte = max(0.0, large_s - small_s) / (share * (_LARGE - _SMALL)) / cores
    return LinkSpeed(float("inf"), 0.0, by_byte, small_s / messages / cores)


_Gloo: Any = dist.ProcessGroupGloo  # torch's types lack the options and the collectives of this class


def _gloo_pair() -> list[Any]:
    store = dist.HashStore()

    def make(rank: int) -> Any:
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        return _Gloo(store, rank, _GROUP_SIZE, options)

    return _run_both(make)


def _cpu_seconds(groups: list[Any], size: int, repeats: int) -> float:
    """Measures a rank's CPU seconds for an all-reduce of `size` bytes, with the copy to a bucket as in DDP."""
    tensors = [torch.zeros(size // 4) for _ in groups]
    buckets = [torch.zeros(size // 4) for _ in groups]

    def sum_up(rank: int) -> None:
        for _ in range(repeats):
            buckets[rank].copy_(tensors[rank])
            groups[rank].allreduce([buckets[rank]]).wait()

    _run_both(sum_up)
    began = time.process_time()
    _run_both(sum_up)
    return (time.process_time() - began) / repeats / len(groups)


def _run_both(run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(_GROUP_SIZE) as pool:
        return list(pool.map(run, range(_GROUP_SIZE)))
