"""Sums and broadcasts of tensors among the processes of one machine, through shared memory.

Each process has two slots that alternate, and a semaphore for each other process that signals a filled slot. All
processes add all slots in the order of ranks, so the sums have equal bits. Between two uses of a slot there is another
sum, which waits for all processes, so all processes have read a slot before the slot is filled again.

POSIX requires sem_post and sem_wait to synchronize memory between processes (release and acquire in glibc, on ARM as on
x86); no plain load or store serves as a flag.

The memory is a memfd, which other processes open through /proc, so a killed run leaves no file. Each process locks one
byte of the memfd. The kernel releases the lock when the process ends, which waiting processes detect within 50 ms.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core.world import World
from manyhands.parallel.group.plain import gather_plain

ON_SEVERAL, ALONE = "the processes are on several machines", "no other process uses this machine"
SLOT_BYTES = 1 << 20  # larger slots gain nothing and exceed the CPU's cache
# torch copies and adds this many values in one thread; more threads would take cores from other processes.
_ALONE = 1 << 15
_PATIENCE_S = 1800.0  # torch's default timeout, if the job has none
_LOOK_NS = 50_000_000  # time between checks that the other process lives
MOST_TRIES = 512  # polls before sleeping, about 200 us; waking up takes 30 us or more
_SHORT_S = 0.0005
_PLACE_BYTES = 64  # per semaphore: a cache line; glibc's semaphore has 32 bytes
_MEMFD = "manyhands-"

_LIBC = ctypes.CDLL(None)  # releases the GIL during calls
_QUICK = ctypes.PyDLL(None)  # keeps the GIL, which is faster


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedSums:
    """Sums tensors over the processes of a machine, one at a time. Concurrent sums need separate objects.

    Attributes:
        slot_bytes: the size of each slot.
        size: the number of processes.
        place: the index of this process among them.
        turn: the index (0 or 1) of the slots that are filled next.
        covers_run: True if these are all processes of the run.
    """

    begun: ClassVar[int] = 0  # sums over all processes of the run that this process has started

    def __init__(self, file: Any, ranks: list[int], place: int, slot_bytes: int, timeout_s: float) -> None:
        size = len(ranks)
        self.slot_bytes, self.turn, self.size, self.place, self._file = slot_bytes, 0, size, place, file
        self._timeout_s, self._tries = timeout_s, 1
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        own, others = memory.data_ptr(), [one for one in range(size) if one != place]
        self._mine = [ctypes.c_void_p(own + _PLACE_BYTES * (place * size + one)) for one in others]
        self._theirs = [(one, ctypes.c_void_p(own + _PLACE_BYTES * (one * size + place))) for one in others]
        for semaphore in self._mine:  # no process waits for these before the last collective of `share_memory`
            _LIBC.sem_init(semaphore, 1, 0)
        slots = memory[_slots_begin(size) :].view(2, size, slot_bytes)
        self._slots, self._ranks = slots, ranks
        self._views: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}
        self.covers_run = dist.is_initialized() and size == dist.get_world_size()

    def process_slots(self, place: int, like: Tensor) -> list[Tensor]:
        """Returns the two slots of process `place` as tensors like `like` [n]. Call `wait_for_slots` before reading."""
        return [slots[place] for slots in self._slots_for(like)]

    def all_reduce(self, values: Tensor) -> None:
        """Replaces `values` [n] by their sum over the processes. A collective.

        Raises RuntimeError if a process has ended or timed out. The object can't be used afterwards.
        """
        for piece in values.split(self.slot_bytes // values.element_size()):
            self.process_slots(self.place, piece)[self.turn].copy_(piece)
            self.sum_slots(piece)

    def sum_slots(self, total: Tensor) -> None:
        """Waits for the slots of all processes, and writes their sum to `total` [n]. A collective; see `all_reduce`."""
        slots = self._slots_for(total)[self.turn]
        self.wait_for_slots()
        torch.add(slots[0], slots[1], out=total)
        for more in slots[2:]:
            total.add_(more)

    def reduce_to_first(self, values: Tensor) -> None:
        """Replaces `values` by their sum, but only on the process with index 0. A collective; see `all_reduce`."""
        for piece in values.split(self.slot_bytes // values.element_size()):
            slots = self._slots_for(piece)[self.turn]
            if self.place:
                _copy_on_one_thread(slots[self.place], piece)
            self.wait_for_slots()
            for more in slots[1:] if self.place == 0 else ():
                for total, one in zip(piece.split(_ALONE), more.split(_ALONE), strict=True):
                    total.add_(one)

    def broadcast(self, values: Tensor) -> None:
        """Replaces `values` [n] by those of the process with index 0. A collective; see `all_reduce`."""
        for piece in values.split(self.slot_bytes // values.element_size()):
            turn = self.turn
            first = self.process_slots(0, piece)[turn]
            if self.place == 0:
                _copy_on_one_thread(first, piece)
            self.wait_for_slots()
            if self.place:
                _copy_on_one_thread(piece, first)

    def wait_for_slots(self) -> None:
        """Waits until all processes have filled their slots of this turn. A collective; see `all_reduce`."""
        try:
            if self._file.closed:
                raise RuntimeError("this process has already released the shared memory")
            SharedSums.begun += self.covers_run
            for semaphore in self._mine:
                _QUICK.sem_post(semaphore)
            for place, semaphore in self._theirs:
                if _QUICK.sem_trywait(semaphore):
                    self._wait(place, semaphore)
        except BaseException:
            self.close()  # no longer in step with other processes, which detect the end
            raise
        self.turn ^= 1

    def close(self) -> None:
        """Releases the lock of this process, so that processes that wait for it fail."""
        self._file.close()

    def __deepcopy__(self, memo: object) -> "SharedSums":
        return self

    def _slots_for(self, like: Tensor) -> list[list[Tensor]]:
        """Returns the slots, first by turn and then by process, as tensors with the dtype and length of `like`."""
        key = like.dtype, like.numel()
        if key not in self._views:
            self._views[key] = [[slot[: like.nbytes].view(like.dtype) for slot in slots] for slots in self._slots]
        return self._views[key]

    def _wait(self, place: int, semaphore: ctypes.c_void_p) -> None:
        began = time.monotonic()
        for _ in range(self._tries):
            if not _QUICK.sem_trywait(semaphore):
                return
        while not _wait_for_post(semaphore):
            if self._has_ended(place):
                if not _QUICK.sem_trywait(semaphore):  # the process has posted, then ended
                    return
                raise RuntimeError(f"remote process exited: rank {self._ranks[place]}, on this machine")
            if time.monotonic() - began > self._timeout_s:
                what = f"Timed out waiting for rank {self._ranks[place]}, silent for {self._timeout_s:.0f} s"
                raise RuntimeError(what)
        self._tries = next_poll_count(self._tries, time.monotonic() - began)

    def _has_ended(self, place: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, place)
        except BlockingIOError:
            return False
        return True


def _copy_on_one_thread(into: Tensor, values: Tensor) -> None:
    for own, one in zip(into.split(_ALONE), values.split(_ALONE), strict=True):
        own.copy_(one)


def next_poll_count(tries: int, waited_s: float) -> int:
    """Returns the next number of polls before a wait sleeps: twice as many after a short wait, else half as many."""
    return min(2 * tries, MOST_TRIES) if waited_s < _SHORT_S else max(tries // 2, 1)


def ranks_by_machine(world: World, group: Any = None) -> list[list[int]] | str:
    """Returns the ranks by machine, or a text with the reason if no machine's ranks can share memory. A collective."""
    answers = gather_plain(_machine_key(), world, group)
    if not any(answers):
        return "this system supports no anonymous shared memory with semaphores"
    machines: dict[Any, list[int]] = {}
    for rank, name in zip(dist.get_process_group_ranks(group), answers, strict=True):
        machines.setdefault(name or rank, []).append(rank)
    return list(machines.values())


def share_memory(
    machines: list[list[int]], world: World, group: Any = None, slot_bytes: int = SLOT_BYTES
) -> SharedSums | str | None:
    """Returns the machine's SharedSums, None for a single process, or the reason (text) for failure. A collective."""
    mine = next(ranks for ranks in machines if world.rank in ranks)
    place, size = mine.index(world.rank), len(mine)
    file, offer = _create_memory(size, slot_bytes) if size > 1 and place == 0 else (None, {})
    offers = gather_plain(offer, world, group)
    offer = offers[dist.get_process_group_ranks(group).index(mine[0])]
    sums, lacks = None, offer.get("lacks", "")
    if size > 1 and not lacks:
        try:
            file = file or _open_memory(offer)
            sums = SharedSums(file, mine, place, slot_bytes, world.collective_timeout_s or _PATIENCE_S)
        except (OSError, ValueError) as error:
            lacks = f"rank {world.rank} can't share memory: {error}"
    lacks = next(filter(None, gather_plain(lacks, world, group)), "")
    if file and lacks:
        file.close()
    return lacks or sums


def _machine_key() -> str:
    """Returns a key that is equal on processes that can open each other's memory, or "" if memory can't be shared."""
    if not hasattr(os, "memfd_create") or not hasattr(_LIBC, "sem_clockwait"):
        return ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _slots_begin(size: int) -> int:
    return -(-_PLACE_BYTES * size * size // mmap.PAGESIZE) * mmap.PAGESIZE


def _create_memory(size: int, slot_bytes: int) -> tuple[Any, dict[str, Any]]:
    """Creates the memory. Returns (memfd, data for `_open_memory`), or (None, {"lacks": reason}) if it fails."""
    name = _MEMFD + secrets.token_hex(8)
    try:
        file = os.fdopen(os.memfd_create(name), "r+b", buffering=0)
        os.truncate(file.fileno(), _slots_begin(size) + 2 * size * slot_bytes)
    except OSError as error:
        return None, {"lacks": f"no memory could be shared: {error}"}
    return file, {"pid": os.getpid(), "file": file.fileno(), "name": name}


def _open_memory(offer: dict[str, Any]) -> Any:
    path = Path(f"/proc/{offer['pid']}/fd/{offer['file']}")
    # Checked before opening, because the descriptor may have become any other file.
    if offer["name"] not in str(path.readlink()):
        raise ValueError(f"{path} is not the shared memory of this run")
    return path.open("r+b", buffering=0)


def _wait_for_post(semaphore: ctypes.c_void_p) -> bool:
    """Waits up to _LOOK_NS nanoseconds for a semaphore. Returns True if another process has posted it."""
    seconds, nanoseconds = divmod(time.monotonic_ns() + _LOOK_NS, 1_000_000_000)
    until = ctypes.byref(_Timespec(seconds, nanoseconds))
    return not _LIBC.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, until)
