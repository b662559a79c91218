"""Heartbeats of a process and detection of stalls."""

import contextlib
import os
import socket
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from manyhands.core.timeouts import HEARTBEAT_S, STALL_FACTOR, STALL_S
from manyhands.parallel.group.heartbeat import HEARTBEAT_FILE, Heartbeat, leave_path
from manyhands.parallel.group.listeners import connections, listens
from manyhands.parallel.replicas.shared_memory import SharedSums

_CUT_S, _CUT = 3.0, 3.0  # a reported stall takes at least so many seconds, and so many times the usual update
_KEPT, _ENOUGH = 20, 3
_ACKED_AT, _INFO_BYTES = 120, 136  # in Linux's struct tcp_info: offset of tcpi_bytes_acked, end of tcpi_bytes_received
_STILL_S = 2.0  # heartbeats have the expensive fields only if progress is older
_MOVES_BYTES, _BUSY_S = 8192, 0.3  # per second: above keep-alive messages, and above the CPU time of waiting


class HeartbeatWriter:
    """Tracks the progress of this process and writes heartbeats."""

    def __init__(self) -> None:
        self.expected_s, self.phase = 0.0, "train"  # seconds of the first update (0: unknown); the current activity
        self.linked = False  # this process communicates with other machines
        self._updates_s: deque[float] = deque(maxlen=_KEPT)
        self._at, self._step, self._waiting = time.monotonic(), 0, False

    def beat(self, *, waiting: bool = False) -> None:
        """Records progress; `waiting`: the process now waits for data."""
        self._at, self._waiting = time.monotonic(), waiting

    def updated(self, step: int) -> str:
        """Records an update that began at the last `beat`; returns a message if it took too long."""
        took_s, self._step = time.monotonic() - self._at, step
        message = self.too_long(took_s)
        # One stall must not change the usual time.
        self._updates_s.append(min(took_s, _CUT * max(self._usual_s(), _CUT_S)) if message else took_s)
        self.beat()
        return message

    def too_long(self, took_s: float) -> str:
        known = len(self._updates_s) >= _ENOUGH
        return stall_message(took_s, self._usual_s(), linked=self.linked) if known and took_s > _CUT_S else ""

    def hung(self) -> str:
        """Returns a message if this process hangs, else an empty string. May take a second."""
        stood_s, usual_s = time.monotonic() - self._at, self._usual_s() or self.expected_s
        if stood_s <= STALL_S + STALL_FACTOR * usual_s:
            return ""
        before, spent = moved_bytes(), time.process_time()
        time.sleep(HEARTBEAT_S)
        if moved_bytes() - before > _MOVES_BYTES or time.process_time() - spent > _BUSY_S:
            return ""
        return f"this process has been waiting for {stood_s:.0f} s without progress"

    @contextlib.contextmanager
    def beating(self) -> Generator[None]:
        """Writes heartbeats in the context, for the agent that started this process, if there is one."""
        path = os.environ.get(HEARTBEAT_FILE)
        if not path:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._write, args=(Path(path), over), daemon=True)
        self.beat()
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(HEARTBEAT_S)

    def heartbeat(self, count: int = 0) -> Heartbeat:
        """Returns the current heartbeat, without the expensive fields within `_STILL_S` of progress."""
        still_s = time.monotonic() - self._at
        known = still_s > _STILL_S
        return Heartbeat(
            count=count,
            step=self._step,
            phase="data" if self._waiting else self.phase,
            still_s=still_s,
            usual_s=self._usual_s() or self.expected_s,
            calls=collectives_begun() if known else -1,
            moved_bytes=moved_bytes() if known else 0,
            cpu_s=time.process_time(),
        )

    def _usual_s(self) -> float:
        return statistics.median(self._updates_s) if self._updates_s else 0.0

    def _write(self, path: Path, over: threading.Event) -> None:
        count, temporary = 0, path.with_suffix(".new")
        while not over.wait(HEARTBEAT_S):
            count += 1
            heartbeat = self.heartbeat(count)
            with contextlib.suppress(OSError):  # a full disk; the agent checks separately that this process runs
                temporary.write_text(heartbeat.model_dump_json(), encoding="utf-8")
                temporary.replace(path)
            if leave_path(path.parent).exists():
                shut_connections()
                return


def shut_connections() -> None:
    """Shuts down connections except listening sockets, so that gloo fails at once instead of waiting for lost peers."""
    for _, connection in connections():
        with contextlib.suppress(OSError):
            if not listens(connection):
                connection.shutdown(socket.SHUT_RDWR)


def stall_message(took_s: float, usual_s: float, *, linked: bool = True) -> str:
    """Returns the message about a stall, empty if the time is usual; `linked`: several machines are involved."""
    if took_s <= max(_CUT_S, _CUT * usual_s):
        return ""
    waited = "the network or another process" if linked else "another process"
    return f"training stalled for {took_s:.3g} s, waiting for {waited} (usual: {usual_s:.2g} s)"


def collectives_begun() -> int:
    """Returns the number of collectives over all processes that this process started; -1 without a process group."""
    if not dist.is_initialized():
        return -1
    size = dist.get_world_size()
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return SharedSums.begun + sum(group._get_sequence_number_for_group() for group in groups if group.size() == size)


def moved_bytes() -> int:
    """Returns the bytes that the connections of this process have sent (acknowledged) and received; 0 if unknown."""
    total = 0
    for _, connection in connections():
        with contextlib.suppress(OSError, AttributeError):
            found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(found) >= _INFO_BYTES:
                total += sum(struct.unpack_from("=QQ", found, _ACKED_AT))
    return total
