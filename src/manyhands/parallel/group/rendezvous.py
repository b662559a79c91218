"""Rendezvous: each process publishes its record in the store and waits for all ranks before torch is initialized.

Any host that reaches the store can write to it, so invalid messages are ignored and control characters removed.
"""

import contextlib
import ipaddress
import itertools
import json
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlparse

import psutil
import torch
import torch.distributed as dist
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from manyhands.core import files, terminal
from manyhands.core.errors import ManyhandsError, PeerError, UserError
from manyhands.core.machine import machine_id
from manyhands.core.world import ProcessInfo
from manyhands.parallel.group import heartbeat, ports

Say = Callable[[str], None]

# Values of another process's options that messages may include: a number, true or false.
_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]{0,30}|true|false|Infinity")

LINGER_S = 3.0  # seconds that rank 0 waits at the end for the others to read the cause of a failure, or to leave
_MOST_BYTES = 1 << 18  # far above any message
_LONGEST_WHAT = 2000
# Messages of torch errors that only report the loss of a peer, which failed first.
CONSEQUENCES = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Timed out waiting",
    "Application timeout caused pair closure", "recvBytes failed", "failed to recv", "connectFullMesh",
    "remote process exited", "Socket closed",
    # From NCCL and torch's NCCL watchdog.
    "Connection closed by remote peer", "remote process exiting", "communicator was aborted", "wait timeout after",
    "collective operation timeout", "operations have failed or timed out", "Socket Timeout",
)  # fmt: skip
# Messages of store errors that another process's failure doesn't cause.
OWN_MISTAKES = ("EADDRINUSE", "Address already in use", "address already in use")


def _printable(text: str) -> str:
    return terminal.plain(text).strip()


def _address(text: str) -> str:
    ipaddress.ip_address(text)
    return text


_Name = Annotated[str, Field(max_length=256), AfterValidator(_printable)]
_Pid = Annotated[int, Field(gt=0, lt=2**31)]
_Rank = Annotated[int, Field(ge=0, lt=2**31)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class ProcessRecord(_Message):
    """The record that a process publishes at the rendezvous, under the key present/<attempt>/<rank>."""

    host: _Name
    machine: Annotated[str, Field(max_length=2000)]
    pid: _Pid
    addresses: Annotated[list[Annotated[str, AfterValidator(_address)]], Field(max_length=256)] = []
    size: Annotated[int, Field(ge=1, lt=2**31)]
    digest: Annotated[str, Field(max_length=_MOST_BYTES // 2), AfterValidator(_printable)] = ""
    torch: _Name = ""
    python: _Name = ""


class DuplicateRank(_Message):
    """A rank that two processes have, reported by the second process under the key present/<attempt>/twice."""

    rank: _Rank
    host: _Name
    pid: _Pid


class InvalidRank(_Message):
    """A report of a process that its own rank is out of range, under the key present/<attempt>/outsider."""

    host: _Name
    pid: _Pid
    digest: Annotated[str, Field(max_length=_MOST_BYTES // 2)]
    what: Annotated[str, Field(max_length=_LONGEST_WHAT), AfterValidator(_printable)]


class PeerFailure(_Message):
    """The first failure of a process in this run, stored under the key failure/<attempt>/text."""

    rank: _Rank
    host: _Name
    what: Annotated[str, Field(max_length=_LONGEST_WHAT), AfterValidator(_printable)]

    @classmethod
    def create(cls, rank: int, host: str, what: str) -> "PeerFailure":
        return cls(rank=rank, host=host[:256], what=what[:_LONGEST_WHAT])


class LivenessAnswer(_Message):
    """A process's answer to a liveness check: two of its heartbeats, under the key roll/<attempt>/<call>/<rank>."""

    before: heartbeat.Heartbeat
    now: heartbeat.Heartbeat


S = TypeVar("S", bound=_Message)


def parse_message(content: bytes | str, kind: type[S]) -> S | None:
    """Parses a JSON message of class `kind`. Returns None if the content is invalid."""
    if len(content) > _MOST_BYTES:
        return None
    with contextlib.suppress(ValueError):  # from JSON, UTF-8 or the validation
        return kind.model_validate(files.parse_json(content))
    return None


REPORT_S = 3.0  # a live rank 0 answers within this time


def report_to_waiting_ranks(process_info: ProcessInfo, report: Callable[[Any], None]) -> None:
    """Calls `report(store)` with the store of the waiting ranks. Gives up after REPORT_S seconds without an answer."""

    def run() -> None:
        with contextlib.suppress(dist.DistError, ValueError, OSError):
            report(dist.PrefixStore(f"present/{process_info.attempt}", _connect_to_store(process_info)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(REPORT_S)


def store_address(process_info: ProcessInfo) -> tuple[str, int]:
    """Returns the store's host and port from --init or the environment. Returns ("", 0) if neither names them."""
    url = urlparse(process_info.init)
    if url.scheme == "tcp":
        return url.hostname or "", url.port or 0
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0") or 0)


def init_path(process_info: ProcessInfo) -> Path | None:
    url = urlparse(process_info.init)
    return Path(url.netloc + url.path) if url.scheme == "file" else None


def _connect_to_store(process_info: ProcessInfo) -> Any:
    if path := init_path(process_info):
        if not path.stat().st_size:
            raise OSError(f"no process listens at {path}")
        return dist.FileStore(str(path), process_info.size)
    host, port = store_address(process_info)
    # Without a listener, torch would retry again and again.
    socket.create_connection((host, port), timeout=REPORT_S).close()
    return dist.TCPStore(host, port, None, False, timedelta(seconds=REPORT_S), False)


def exchange_records(store: Any, process_info: ProcessInfo, digest: str, say: Say) -> dict[int, dict[str, Any]]:
    """Publishes this process's record in the store and waits for the records of all ranks. Returns {rank: record}.

    Raises UserError if the rank is taken or the jobs differ, and PeerError if a rank is missing or rank 0 has ended.
    """
    store = dist.PrefixStore(f"present/{process_info.attempt}", store)
    me = {
        "host": socket.gethostname(), "machine": machine_id(), "pid": os.getpid(),
        "addresses": ports.reachable_addresses(),
        "size": process_info.size, "digest": digest,
        "torch": torch.__version__, "python": platform.python_version(), "time": time.time(),
    }  # fmt: skip
    try:
        if store.add(f"count/{process_info.rank}", 1) > 1:
            report_duplicate_rank(store, process_info, digest)
            raise _rank_taken_error(store, process_info)
        store.set(str(process_info.rank), json.dumps(me))
        present = _wait_for_ranks(store, process_info, digest, say)
        store.add("read", 1)
        for rank, other in present.items():
            _require_equal_jobs(process_info, me, rank, other)
    except (dist.DistError, ValueError):  # ValueError: a count in an init file is not a number
        what = "the store failed during the rendezvous"
        hints = ("see rank 0's log if rank 0 has ended", "check that no other program writes to the store")
        raise PeerError(what, process_info.init, hints) from None
    except ManyhandsError:
        if process_info.rank == 0:
            wait_for_count(store, "read", sum(store.check([str(rank)]) for rank in range(process_info.size)))
        raise
    return present


def report_duplicate_rank(store: Any, process_info: ProcessInfo, digest: str) -> None:
    """Reports to the waiting ranks that this process has a rank that another process already has."""
    key = str(process_info.rank)
    first = parse_message(store.get(key), ProcessRecord) if store.check([key]) else None
    # The first process may not have written its record yet. A process of another job on this port is no duplicate.
    if not first or (first.size, first.digest) == (process_info.size, digest):
        two = DuplicateRank(rank=process_info.rank, host=socket.gethostname(), pid=os.getpid())
        store.set("twice", two.model_dump_json())


def report_invalid_rank(store: Any, digest: str, what: str) -> None:
    """Reports to the waiting ranks that this process exits because its rank is invalid, as `what` says."""
    invalid_rank = InvalidRank(host=socket.gethostname(), pid=os.getpid(), digest=digest, what=what)
    store.set("outsider", invalid_rank.model_dump_json())


def _refuse_reported(store: Any, process_info: ProcessInfo, digest: str, present: dict[int, dict[str, Any]]) -> None:
    """Raises UserError if a process has reported a duplicate or invalid rank, since then some rank never joins."""
    two = parse_message(store.get("twice"), DuplicateRank) if store.check(["twice"]) else None
    invalid_rank = parse_message(store.get("outsider"), InvalidRank) if store.check(["outsider"]) else None
    if two and two.rank < process_info.size:
        first = present.get(two.rank)
        also = f" and to process {first['pid']} on {first['host']}" if first else ""
        what = f"rank {two.rank} was given twice: to process {two.pid} on {two.host}{also}"
    elif invalid_rank and invalid_rank.digest == digest:
        what = f"process {invalid_rank.pid} on {invalid_rank.host} can't join: {invalid_rank.what}"
    else:
        return
    store.add("read", 1)
    hints = (f"restart all processes, each with a unique rank from 0 to {process_info.size - 1}",)
    raise UserError(what, "--rank" if process_info.started_by == "--init" else "RANK", hints)


def wait_for_count(store: Any, key: str, count: int) -> None:
    """Waits until the counter `key` in the store has reached `count`, but at most LINGER_S seconds."""
    until = time.monotonic() + LINGER_S
    with contextlib.suppress(dist.DistError, RuntimeError):
        while store.add(key, 0) < count and time.monotonic() < until:
            time.sleep(0.02)


def _wait_for_ranks(store: Any, process_info: ProcessInfo, digest: str, say: Say) -> dict[int, dict[str, Any]]:
    started, warned = time.monotonic(), False
    present: dict[int, dict[str, Any]] = {}
    while True:
        for rank in range(process_info.size):
            if rank not in present and store.check([str(rank)]):
                record = parse_message(store.get(str(rank)), ProcessRecord)
                if not record:
                    continue  # invalid; the process with this rank will overwrite it
                present[rank] = record.model_dump()
                _refuse_ended_run(present[rank], rank, process_info)
                if present[rank]["size"] != process_info.size:
                    return present
        missing = [rank for rank in range(process_info.size) if rank not in present]
        if not missing:
            return present
        _refuse_reported(store, process_info, digest, present)
        waited = time.monotonic() - started
        text = f"{len(present)} of {process_info.size} processes have joined; missing: rank {_format_ranges(missing)}"
        if waited > process_info.join_timeout_s:
            start = "start the missing ranks on their machines, with the same job and the same list of machines"
            if process_info.started_by == "--init":
                start = "start the missing ranks with the same --init and --world-size"
            hints = (start, "or wait longer: cluster.join_timeout_s")
            raise PeerError(f"{text}, after {waited:.0f} s", _rendezvous_address(process_info), hints)
        if waited > process_info.join_warn_s and not warned:
            warned = True
            say(f"{text}; still waiting, up to {process_info.join_timeout_s:.0f} s in total (cluster.join_timeout_s)")
        time.sleep(0.01 if waited < 5 else 0.2)


def _rendezvous_address(process_info: ProcessInfo) -> str:
    if not process_info.init.startswith("env://"):
        return process_info.init
    return f"tcp://{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _refuse_ended_run(other: dict[str, Any], rank: int, process_info: ProcessInfo) -> None:
    here = other["machine"] == machine_id()
    if process_info.init.startswith("file://") and here and not psutil.pid_exists(other["pid"]):
        path = process_info.init.removeprefix("file://")
        what = f"the init file {path} is from an earlier run, whose rank {rank} (process {other['pid']}) has ended"
        raise UserError(what, "--init", (f"rm {path}, or use a new file name",))


def _require_equal_jobs(process_info: ProcessInfo, me: dict[str, Any], rank: int, other: dict[str, Any]) -> None:
    words = {"size": "--world-size", "torch": "torch's version", "digest": "the job (flags or job.toml)"}
    for key, word in words.items():
        if me[key] != other[key]:
            shown = f": {me[key]} here, {other[key]} there" if key != "digest" else _option_diff(me[key], other[key])
            two = f"rank {process_info.rank} on {me['host']} and rank {rank} on {other['host']}"
            hints = ("start all ranks with the same command except for --rank",)
            raise UserError(f"{two} differ in {word}{shown}", _rendezvous_address(process_info), hints)


def _option_diff(here: str, there: str) -> str:
    """Lists the options that differ between two results of `shared_options`. Returns "" if none differ."""

    def by_option(text: str) -> dict[str, str]:
        return {key: value for key, _, value in (word.partition("=") for word in text.split())}

    mine, others = by_option(here), by_option(there)
    differing: list[str] = []
    for option, value in mine.items():
        other = others.get(option)
        if other != value:
            both = other is not None and _NUMBER.fullmatch(value) and _NUMBER.fullmatch(other)
            differing.append(f"{option} ({value} here, {other} there)" if both else option)
    return f": {', '.join(differing[:5])}{' …' * (len(differing) > 5)}" if differing else ""


def _rank_taken_error(store: Any, process_info: ProcessInfo) -> UserError:
    other: ProcessRecord | None = None
    with contextlib.suppress(RuntimeError, ValueError):
        # The other process may not have written its record yet.
        store.wait([str(process_info.rank)], timedelta(seconds=LINGER_S))
        other = parse_message(store.get(str(process_info.rank)), ProcessRecord)
    who = f" by process {other.pid} on {other.host}" if other else ""
    if process_info.init.startswith("file://"):
        path = process_info.init.removeprefix("file://")
        what = f"the init file {path} already has a rank {process_info.rank}, written{who}"
        remove = f"if an earlier run left the file: rm {path}, or use a new file name"
        return UserError(what, "--init", (remove, "or give each process its own --rank"))
    hints = (f"give each process its own --rank, 0 to {process_info.size - 1}",)
    return UserError(f"rank {process_info.rank} is taken{who}", "--rank", hints)


def _format_ranges(ranks: list[int]) -> str:
    groups = itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def is_peer_loss(error: BaseException) -> bool:
    """Returns True if an error only reports that another process ended or is unreachable."""
    if isinstance(error, ManyhandsError):
        return False
    said = str(error)
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return not any(text in said for text in OWN_MISTAKES)
    # An error of a backend may also be the cause: NCCL raises "Duplicate GPU detected" on every rank.
    return isinstance(error, RuntimeError) and any(text in said for text in CONSEQUENCES)
