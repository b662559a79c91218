"""How processes meet: each writes its name into the store and waits for the others' before torch's own initialisation.

So a rank that is missing, there twice, or of another job is named instead of waited for in silence.
"""

import contextlib
import json
import os
import platform
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from manyhands.core.errors import ManyhandsError, PeerError, UserError
from manyhands.core.machine import this_machine
from manyhands.core.world import ProcessInfo
from manyhands.parallel.ports import outer_addresses
from manyhands.parallel.said import DuplicateRank, InvalidRank, Present, understood

Say = Callable[[str], None]

# What is shown of another process's options: a number, true or false.
_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]{0,30}|true|false|Infinity")

# A process that holds the store and gives up waits so long for the others to see why.
LINGER_S = 3.0


def check_in(store: Any, process_info: ProcessInfo, digest: str, say: Say) -> dict[int, dict[str, Any]]:
    """Writes this process's name into the store and waits until everybody's is there and fits; names by rank.

    Raises:
        UserError: this rank is taken, or a process is of another job.
        PeerError: somebody didn't come, or rank 0 went away.
    """
    names = dist.PrefixStore(f"present/{process_info.attempt}", store)
    me = {
        "host": socket.gethostname(), "machine": this_machine(), "pid": os.getpid(),
        "addresses": outer_addresses(),
        "size": process_info.size, "digest": digest,
        "torch": torch.__version__, "python": platform.python_version(), "time": time.time(),
    }  # fmt: skip
    try:
        if names.add(f"count/{process_info.rank}", 1) > 1:
            report_duplicate_rank(names, process_info, digest)
            raise _place_taken(names, process_info)
        names.set(str(process_info.rank), json.dumps(me))
        present = _wait_for_names(names, process_info, digest, say)
        names.add("read", 1)
        for rank, other in present.items():
            _compare(process_info, me, rank, other)
    except (dist.DistError, ValueError):  # a ValueError where a count in an init file is none
        what = "the store failed during the rendezvous"
        hints = ("see rank 0's log if rank 0 has ended", "check that no other program writes to the store")
        raise PeerError(what, process_info.init, hints) from None
    except ManyhandsError:
        if process_info.rank == 0:
            linger(names, "read", sum(names.check([str(rank)]) for rank in range(process_info.size)))
        raise
    return present


def report_duplicate_rank(names: Any, process_info: ProcessInfo, digest: str) -> None:
    """Tells all that wait that a second process of their job was started with this rank: certain to be wrong."""
    key = str(process_info.rank)
    first = understood(names.get(key), Present) if names.check([key]) else None
    # One that has just come may not have written its name yet; another job on the same port is no second one.
    if not first or (first.size, first.digest) == (process_info.size, digest):
        two = DuplicateRank(rank=process_info.rank, host=socket.gethostname(), pid=os.getpid())
        names.set("twice", two.model_dump_json())


def report_invalid_rank(names: Any, digest: str, what: str) -> None:
    """Tells all that wait that a process of their job ends, since its rank is none: a rank of theirs never comes."""
    invalid_rank = InvalidRank(host=socket.gethostname(), pid=os.getpid(), digest=digest, what=what)
    names.set("outsider", invalid_rank.model_dump_json())


def _refuse_invalid_rank(names: Any, process_info: ProcessInfo, digest: str) -> None:
    invalid_rank = understood(names.get("outsider"), InvalidRank) if names.check(["outsider"]) else None
    if not invalid_rank or invalid_rank.digest != digest:
        return
    names.add("read", 1)
    who = f"process {invalid_rank.pid} on {invalid_rank.host}"
    raise _start_anew(f"{who} can't join: {invalid_rank.what}", process_info)


def _start_anew(what: str, process_info: ProcessInfo) -> UserError:
    hints = (f"restart all processes, each with a unique rank from 0 to {process_info.size - 1}",)
    return UserError(what, "--rank" if process_info.started_by == "--init" else "RANK", hints)


def _refuse_two(names: Any, process_info: ProcessInfo, present: dict[int, dict[str, Any]]) -> None:
    """Ends this process too where two were started with one rank: another rank must be missing, and never comes."""
    two = understood(names.get("twice"), DuplicateRank) if names.check(["twice"]) else None
    if not two or two.rank >= process_info.size:
        return
    names.add("read", 1)
    first = present.get(two.rank)
    also = f" and to process {first['pid']} on {first['host']}" if first else ""
    what = f"rank {two.rank} was given twice: to process {two.pid} on {two.host}{also}"
    raise _start_anew(what, process_info)


def linger(store: Any, key: str, count: int) -> None:
    """Waits until `count` processes have added themselves to a key, for a few seconds at most."""
    until = time.monotonic() + LINGER_S
    with contextlib.suppress(dist.DistError, RuntimeError):
        while store.add(key, 0) < count and time.monotonic() < until:
            time.sleep(0.02)


def _wait_for_names(names: Any, process_info: ProcessInfo, digest: str, say: Say) -> dict[int, dict[str, Any]]:
    started, warned = time.monotonic(), False
    present: dict[int, dict[str, Any]] = {}
    while True:
        for rank in range(process_info.size):
            if rank not in present and names.check([str(rank)]):
                said = understood(names.get(str(rank)), Present)
                if not said:
                    continue  # junk; the process itself, when it comes, writes over it
                present[rank] = said.model_dump()
                _refuse_dead(present[rank], rank, process_info)
                if present[rank]["size"] != process_info.size:
                    return present
        missing = [rank for rank in range(process_info.size) if rank not in present]
        if not missing:
            return present
        _refuse_two(names, process_info, present)
        _refuse_invalid_rank(names, process_info, digest)
        waited = time.monotonic() - started
        text = f"{len(present)} of {process_info.size} processes have joined; missing: rank {_ranges(missing)}"
        if waited > process_info.join_timeout_s:
            raise PeerError(
                f"{text}, after {waited:.0f} s",
                _rendezvous_address(process_info),
                (
                    "start the missing ranks with the same --init and --world-size"
                    if process_info.started_by == "--init"
                    else "start the missing ranks on their machines, with the same job and the same list of machines",
                    "or wait longer: cluster.join_timeout_s",
                ),
            )
        if waited > process_info.join_warn_s and not warned:
            warned = True
            say(f"{text}; giving up after {process_info.join_timeout_s:.0f} s (cluster.join_timeout_s)")
        time.sleep(0.01 if waited < 5 else 0.2)


def _rendezvous_address(process_info: ProcessInfo) -> str:
    if not process_info.init.startswith("env://"):
        return process_info.init
    return f"tcp://{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _refuse_dead(other: dict[str, Any], rank: int, process_info: ProcessInfo) -> None:
    """An init file may hold the name of a process that has ended long ago."""
    here = other["machine"] == this_machine()
    if process_info.init.startswith("file://") and here and not psutil.pid_exists(other["pid"]):
        path = process_info.init.removeprefix("file://")
        what = f"the init file {path} is from an earlier run, whose rank {rank} (process {other['pid']}) has ended"
        raise UserError(what, "--init", (f"rm {path}, or use a new file name",))


def _compare(process_info: ProcessInfo, me: dict[str, Any], rank: int, other: dict[str, Any]) -> None:
    words = {"size": "--world-size", "torch": "torch's version", "digest": "the job (flags or job.toml)"}
    for key, word in words.items():
        if me[key] != other[key]:
            shown = f": {me[key]} here, {other[key]} there" if key != "digest" else _options(me[key], other[key])
            what = (
                f"rank {process_info.rank} on {me['host']} and rank {rank} on {other['host']} differ in {word}{shown}"
            )
            hints = ("start all ranks with the same command except for --rank",)
            raise UserError(what, _rendezvous_address(process_info), hints)


def _options(here: str, there: str) -> str:
    """Names the options in which two jobs differ, and numbers of theirs; both are as `shared_options` writes them."""
    mine, others = _by_option(here), _by_option(there)
    differing: list[str] = []
    for option, value in mine.items():
        other = others.get(option)
        if other == value:
            continue
        both = other is not None and _NUMBER.fullmatch(value) and _NUMBER.fullmatch(other)
        differing.append(f"{option} ({value} here, {other} there)" if both else option)
    return f": {', '.join(differing[:5])}{' …' * (len(differing) > 5)}" if differing else ""


def _by_option(words: str) -> dict[str, str]:
    return {option: value for option, _, value in (word.partition("=") for word in words.split())}


def _place_taken(names: Any, process_info: ProcessInfo) -> UserError:
    """Another process has this rank: a second start, or an earlier run's init file."""
    other: Present | None = None
    with contextlib.suppress(RuntimeError, ValueError):
        # The other may have taken the place a moment ago and not have written its name yet.
        names.wait([str(process_info.rank)], timedelta(seconds=LINGER_S))
        other = understood(names.get(str(process_info.rank)), Present)
    who = f" by process {other.pid} on {other.host}" if other else ""
    if process_info.init.startswith("file://"):
        path = process_info.init.removeprefix("file://")
        return UserError(
            f"the init file {path} already has a rank {process_info.rank}, written{who}",
            "--init",
            (
                f"if an earlier run left the file: rm {path}, or use a new file name",
                "or give each process its own --rank",
            ),
        )
    return UserError(
        f"rank {process_info.rank} is taken{who}",
        "--rank",
        (f"give each process its own --rank, 0 to {process_info.size - 1}",),
    )


def _ranges(ranks: list[int]) -> str:
    """[1, 2, 3, 7] as "1-3, 7"."""
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank if rank is not None else -1
    return ", ".join(parts)
