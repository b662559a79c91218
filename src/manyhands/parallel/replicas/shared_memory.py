"""Sums over the processes of one machine through memory that they share. No connection, and no compiler.

Each process has a slot, and for each other one a semaphore on which it says "my slot is filled". All add up all slots
in the order of ranks, so all get the same bits. There are two sets of slots, which take turns: who comes to fill a slot
again has met all others in the sum between, so they have read it.

What orders a flag after the data: POSIX has sem_post and sem_wait (also trywait, clockwait) synchronise memory between
processes, and glibc's are atomic operations with release and acquire order, on ARM as on x86. No plain load or store
is ever used as a flag, nor is it Python that orders anything.

The memory has no name in any folder: it is a memfd that others open by its number in /proc while its maker lives, so
nothing is left, whatever is killed. Each process locks its byte of it, which the system unlocks when it ends; so those
that wait hear of a death as soon as they look, which is twenty times a second.
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

# Why there are no sums through memory.
ON_SEVERAL, ALONE = "the processes are on several machines", "no other process uses this machine"
SLOT_BYTES = 1 << 20  # more gains nothing, and leaves the processor's cache
# So many values torch copies and adds without other threads. A thread beside the one that computes would get some of
# its own, which take the cores from the others.
_ALONE = 1 << 15
# torch's own patience, where a job says none.
_PATIENCE_S = 1800.0
# How long a process sleeps before it looks whether the one it waits for still lives.
_LOOK_NS = 50_000_000
# Tries before it sleeps, some 200 us; to be woken takes 30 and more.
MOST_TRIES = 512
_SHORT_S = 0.0005
# A semaphore's place, a cache line; glibc's take 32 bytes.
_PLACE_BYTES = 64
_MEMFD = "manyhands-"

_LIBC = ctypes.CDLL(None)  # lets other threads run while it waits
_QUICK = ctypes.PyDLL(None)  # doesn't, which costs less


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedSums:
    """This process's end of one numbered sequence of sums; others, also at the same time, need one of their own.

    Args:
        file: the memory.
        ranks: of the processes that add up, for the user.
        place: this process's among them.
        slot_bytes: of each process's slot.
        timeout_s: how long a silent process is waited for.

    Attributes:
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

    def own_slots(self, like: Tensor) -> list[Tensor]:
        """Where this process puts what it adds to a sum like the flat `like` [n], by turn."""
        return self.slots_of(self.place, like)

    def slots_of(self, place: int, like: Tensor) -> list[Tensor]:
        """Where another puts it, which may be read after `meet`, up to the next one."""
        return [slots[place] for slots in self._slots_for(like)]

    def add_up(self, values: Tensor) -> None:
        """Replaces flat values [n] by their sum over all processes; a collective.

        Raises:
            RuntimeError: a process has ended, or was silent for too long; nothing can be added up any more.
        """
        for piece in values.split(self.slot_bytes // values.element_size()):
            self.own_slots(piece)[self.turn].copy_(piece)
            self.add_slots_up(piece)

    def add_slots_up(self, total: Tensor) -> None:
        """The same of what stands in this turn's `own_slots`, into the flat total [n]."""
        slots = self._slots_for(total)[self.turn]
        self.meet()
        torch.add(slots[0], slots[1], out=total)
        for more in slots[2:]:
            total.add_(more)

    def add_up_for_first(self, values: Tensor) -> None:
        """The same as `add_up`, for the process at place 0 alone; the others' values stay."""
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
        """Waits until all slots of this turn are filled, which are then to be read; raises as `add_up` does."""
        try:
            self._meet()
        except BaseException:
            self.close()  # out of step from now on, which others are to hear
            raise
        self.turn ^= 1

    def close(self) -> None:
        """Leaves; who waits for this process hears it."""
        self._file.close()

    def __deepcopy__(self, memo: object) -> "SharedSums":
        """A copied network's layers go the same way."""
        return self

    def _slots_for(self, like: Tensor) -> list[list[Tensor]]:
        """By turn and place, the slots' beginnings as flat tensors of this type and length."""
        key = like.dtype, like.numel()
        found = self._views.get(key)
        if found is None:
            found = [[slot[: like.nbytes].view(like.dtype) for slot in slots] for slots in self._slots]
            self._views[key] = found
        return found

    def _meet(self) -> None:
        """Says that this process's slot is filled, and waits for all others'."""
        if self._file.closed:
            raise RuntimeError("this process has already released the shared memory")
        SharedSums.begun += self.of_all
        for semaphore in self._mine:
            _QUICK.sem_post(semaphore)
        for place, semaphore in self._theirs:
            if _QUICK.sem_trywait(semaphore):
                self._wait(place, semaphore)

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
                answers = f"Timed out waiting for rank {self._ranks[place]}, silent for {self._timeout_s:.0f} s"
                raise RuntimeError(answers)
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
    """How often is tried from now on, where so many tries didn't do and it took so long in all.

    More where a few more would have done; fewer where others are far, as with more processes than cores.
    """
    return min(2 * tries, MOST_TRIES) if waited_s < _SHORT_S else max(tries // 2, 1)


def machines_of_group(world: World, group: Any = None) -> list[list[int]] | str:
    """Ranks of those who can open each other's memory, by their first; or why nobody can. A collective."""
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
    """The sums of this process's machine, None where it is alone there; or why some have none. A collective of all.

    That all of a machine are on it is known by trying: the first one's memory is opened by all.
    """
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
    """Equal where processes can open each other's memory by their numbers; empty where this isn't known."""
    if not hasattr(os, "memfd_create") or not hasattr(_LIBC, "sem_clockwait"):
        return ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _slots_begin(size: int) -> int:
    return -(-_PLACE_BYTES * size * size // mmap.PAGESIZE) * mmap.PAGESIZE


def _offered(size: int, slot_bytes: int) -> tuple[Any, dict[str, Any]]:
    """New memory, and what others open it by, or why there is none."""
    name = _MEMFD + secrets.token_hex(8)
    try:
        file = os.fdopen(os.memfd_create(name), "r+b", buffering=0)
        os.truncate(file.fileno(), _slots_begin(size) + 2 * size * slot_bytes)
    except OSError as error:
        return None, {"lacks": f"no memory could be shared: {error}"}
    return file, {"pid": os.getpid(), "file": file.fileno(), "name": name}


def _opened(offer: dict[str, Any]) -> Any:
    """What another process has offered. Raises OSError, ValueError: that isn't there."""
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
