"""Sums over the processes of one machine through shared memory.

Each process has a slot, and for each other process a semaphore that says "my slot is filled". All add up all slots in
the order of ranks, so all get the same bits. Two sets of slots take turns: a process that fills a slot again has met
all others in the sum between, so they have read it.

POSIX has sem_post and sem_wait synchronize memory between processes (release and acquire in glibc, on ARM as on x86);
no plain load or store is used as a flag.

The memory is a memfd, which others open by its number in /proc, so nothing is left after a kill. Each process locks its
byte of it; the lock ends with the process, so waiting processes notice its death within 50 ms.
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
SLOT_BYTES = 1 << 20  # more gains nothing, and leaves the processor's cache
# torch copies and adds so many values without other threads, which would take cores from other processes.
_ALONE = 1 << 15
_PATIENCE_S = 1800.0  # torch's default, without a timeout of the job
_LOOK_NS = 50_000_000  # sleep between checks that the other process lives
MOST_TRIES = 512  # tries before sleeping, some 200 us; waking takes 30 us and more
_SHORT_S = 0.0005
_PLACE_BYTES = 64  # a semaphore's slot, a cache line; glibc's take 32 bytes
_MEMFD = "manyhands-"

_LIBC = ctypes.CDLL(None)  # lets other threads run while it waits
_QUICK = ctypes.PyDLL(None)  # doesn't, which costs less


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedSums:
    """This process's end of one sequence of sums; concurrent sequences each need one of their own.

    Attributes:
        slot_bytes: of each process's slot.
        size: how many processes add up.
        place: this process's among them.
        turn: which of a process's slots is filled next.
        of_all: all processes of the run add up.
    """

    begun: ClassVar[int] = 0  # sums of all processes of the run that this one has come to

    def __init__(self, file: Any, ranks: list[int], place: int, slot_bytes: int, timeout_s: float) -> None:
        size = len(ranks)
        self.slot_bytes, self.turn, self.size, self.place, self._file = slot_bytes, 0, size, place, file
        self._timeout_s, self._tries = timeout_s, 1
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        own, others = memory.data_ptr(), [one for one in range(size) if one != place]
        self._mine = [ctypes.c_void_p(own + _PLACE_BYTES * (place * size + one)) for one in others]
        self._theirs = [(one, ctypes.c_void_p(own + _PLACE_BYTES * (one * size + place))) for one in others]
        for semaphore in self._mine:  # nobody waits for them before all have said that they are here
            _LIBC.sem_init(semaphore, 1, 0)
        slots = memory[_slots_begin(size) :].view(2, size, slot_bytes)
        self._slots, self._ranks = slots, ranks
        self._views: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}
        self.of_all = dist.is_initialized() and size == dist.get_world_size()

    def slots_of(self, place: int, like: Tensor) -> list[Tensor]:
        """A process's slots by turn for flat values like `like` [n]; others' are readable after `meet`."""
        return [slots[place] for slots in self._slots_for(like)]

    def add_up(self, values: Tensor) -> None:
        """Replaces flat values [n] by their sum over all processes; a collective.

        Raises RuntimeError if a process has ended or was silent for too long; the sums can't be used again.
        """
        for piece in values.split(self.slot_bytes // values.element_size()):
            self.slots_of(self.place, piece)[self.turn].copy_(piece)
            self.add_slots_up(piece)

    def add_slots_up(self, total: Tensor) -> None:
        """Sums this turn's `own_slots` of all processes into the flat total [n]."""
        slots = self._slots_for(total)[self.turn]
        self.meet()
        torch.add(slots[0], slots[1], out=total)
        for more in slots[2:]:
            total.add_(more)

    def add_up_for_first(self, values: Tensor) -> None:
        """As `add_up`, on the process at place 0 only; the others' values stay."""
        for piece in values.split(self.slot_bytes // values.element_size()):
            slots = self._slots_for(piece)[self.turn]
            if self.place:
                _copy_alone(slots[self.place], piece)
            self.meet()
            for more in slots[1:] if self.place == 0 else ():
                for total, one in zip(piece.split(_ALONE), more.split(_ALONE), strict=True):
                    total.add_(one)

    def spread(self, values: Tensor) -> None:
        """Replaces flat values [n] by those of the process at place 0; a collective, which raises as `add_up` does."""
        for piece in values.split(self.slot_bytes // values.element_size()):
            turn = self.turn
            first = self.slots_of(0, piece)[turn]
            if self.place == 0:
                _copy_alone(first, piece)
            self.meet()
            if self.place:
                _copy_alone(piece, first)

    def meet(self) -> None:
        """Waits until all slots of this turn are filled and can be read; raises as `add_up` does."""
        try:
            if self._file.closed:
                raise RuntimeError("this process has already released the shared memory")
            SharedSums.begun += self.of_all
            for semaphore in self._mine:
                _QUICK.sem_post(semaphore)
            for place, semaphore in self._theirs:
                if _QUICK.sem_trywait(semaphore):
                    self._wait(place, semaphore)
        except BaseException:
            self.close()  # out of step from now on, which the others notice
            raise
        self.turn ^= 1

    def close(self) -> None:
        """Leaves; processes that wait for this one notice."""
        self._file.close()

    def __deepcopy__(self, memo: object) -> "SharedSums":
        return self

    def _slots_for(self, like: Tensor) -> list[list[Tensor]]:
        """The slots by turn and place, as flat tensors of this type and length."""
        key = like.dtype, like.numel()
        if key not in self._views:
            self._views[key] = [[slot[: like.nbytes].view(like.dtype) for slot in slots] for slots in self._slots]
        return self._views[key]

    def _wait(self, place: int, semaphore: ctypes.c_void_p) -> None:
        began = time.monotonic()
        for _ in range(self._tries):
            if not _QUICK.sem_trywait(semaphore):
                return
        while not _came(semaphore):
            if self._has_gone(place):
                if not _QUICK.sem_trywait(semaphore):  # it came, and left then
                    return
                raise RuntimeError(f"remote process exited: rank {self._ranks[place]}, which shared this memory")
            if time.monotonic() - began > self._timeout_s:
                what = f"Timed out waiting for rank {self._ranks[place]}, silent for {self._timeout_s:.0f} s"
                raise RuntimeError(what)
        self._tries = tries_after(self._tries, time.monotonic() - began)

    def _has_gone(self, place: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, place)
        except BlockingIOError:
            return False
        return True


def _copy_alone(into: Tensor, values: Tensor) -> None:
    for own, one in zip(into.split(_ALONE), values.split(_ALONE), strict=True):
        own.copy_(one)


def tries_after(tries: int, waited_s: float) -> int:
    """Tries before sleeping, adapted: more if a few more would have sufficed, fewer with more processes than cores."""
    return min(2 * tries, MOST_TRIES) if waited_s < _SHORT_S else max(tries // 2, 1)


def machines_of_group(world: World, group: Any = None) -> list[list[int]] | str:
    """Ranks that can open each other's memory, by machine; or why none can. A collective."""
    answers = gather_plain(_machine(), world, group)
    if not any(answers):
        return "this system supports no anonymous shared memory with semaphores"
    machines: dict[Any, list[int]] = {}
    for rank, name in zip(dist.get_process_group_ranks(group), answers, strict=True):
        machines.setdefault(name or rank, []).append(rank)
    return list(machines.values())


def share_within(
    machines: list[list[int]], world: World, group: Any = None, slot_bytes: int = SLOT_BYTES
) -> SharedSums | str | None:
    """The sums of this process's machine, None if it is alone there; or why there are none. A collective of all."""
    mine = next(ranks for ranks in machines if world.rank in ranks)
    place, size = mine.index(world.rank), len(mine)
    file, offer = _offered(size, slot_bytes) if size > 1 and place == 0 else (None, {})
    offers = gather_plain(offer, world, group)
    offer = offers[dist.get_process_group_ranks(group).index(mine[0])]
    sums, lacks = None, offer.get("lacks", "")
    if size > 1 and not lacks:
        try:
            file = file or _opened(offer)
            sums = SharedSums(file, mine, place, slot_bytes, world.collective_timeout_s or _PATIENCE_S)
        except (OSError, ValueError) as error:
            lacks = f"rank {world.rank} can't share memory: {error}"
    lacks = next(filter(None, gather_plain(lacks, world, group)), "")
    if file and lacks:
        file.close()
    return lacks or sums


def _machine() -> str:
    """Equal on processes that can open each other's memory by its number; empty if unknown."""
    if not hasattr(os, "memfd_create") or not hasattr(_LIBC, "sem_clockwait"):
        return ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _slots_begin(size: int) -> int:
    return -(-_PLACE_BYTES * size * size // mmap.PAGESIZE) * mmap.PAGESIZE


def _offered(size: int, slot_bytes: int) -> tuple[Any, dict[str, Any]]:
    """New memory and how others open it, or why there is none."""
    name = _MEMFD + secrets.token_hex(8)
    try:
        file = os.fdopen(os.memfd_create(name), "r+b", buffering=0)
        os.truncate(file.fileno(), _slots_begin(size) + 2 * size * slot_bytes)
    except OSError as error:
        return None, {"lacks": f"no memory could be shared: {error}"}
    return file, {"pid": os.getpid(), "file": file.fileno(), "name": name}


def _opened(offer: dict[str, Any]) -> Any:
    """Opens another process's memory. Raises OSError, ValueError."""
    path = Path(f"/proc/{offer['pid']}/fd/{offer['file']}")
    # Looked at before it is opened: it might be anything of anybody's.
    if offer["name"] not in str(path.readlink()):
        raise ValueError(f"{path} is not the shared memory of this run")
    return path.open("r+b", buffering=0)


def _came(semaphore: ctypes.c_void_p) -> bool:
    """Sleeps until another process posts, a signal comes or some time has passed; True for the first."""
    seconds, nanoseconds = divmod(time.monotonic_ns() + _LOOK_NS, 1_000_000_000)
    until = ctypes.byref(_Timespec(seconds, nanoseconds))
    return not _LIBC.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, until)
