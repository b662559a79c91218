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
from manyhands.core.world import Membership
from manyhands.parallel.ports import outer_addresses
from manyhands.parallel.said import Outsider, Present, Twice, understood

Say = Callable[[str], None]

# What is shown of another process's options: a number, true or false.
_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]{0,30}|true|false|Infinity")

# A process that holds the store and gives up waits so long for the others to see why.
LINGER_S = 3.0


def check_in(store: Any, membership: Membership, digest: str, say: Say) -> dict[int, dict[str, Any]]:
    """Writes this process's name into the store and waits until everybody's is there and fits; names by rank.

    Raises:
        UserError: this rank is taken, or a process is of another job.
        PeerError: somebody didn't come, or rank 0 went away.
    """
    names = dist.PrefixStore(f"present/{membership.attempt}", store)
    me = {
        "host": socket.gethostname(), "machine": this_machine(), "pid": os.getpid(),
        "addresses": outer_addresses(),
        "size": membership.size, "digest": digest,
        "torch": torch.__version__, "python": platform.python_version(), "time": time.time(),
    }  # fmt: skip
    try:
        if names.add(f"count/{membership.rank}", 1) > 1:
            tell_of_two(names, membership, digest)
            raise _place_taken(names, membership)
        names.set(str(membership.rank), json.dumps(me))
        present = _wait_for_names(names, membership, digest, say)
        names.add("read", 1)
        for rank, other in present.items():
            _compare(membership, me, rank, other)
    except (dist.DistError, ValueError):  # a ValueError where a count in an init file is none
        what = "the store failed during the rendezvous"
        mend = ("see rank 0's log if rank 0 has ended", "check that no other program writes to the store")
        raise PeerError(what, membership.init, mend) from None
    except ManyhandsError:
        if membership.rank == 0:
            linger(names, "read", sum(names.check([str(rank)]) for rank in range(membership.size)))
        raise
    return present


def tell_of_two(names: Any, membership: Membership, digest: str) -> None:
    """Tells all that wait that a second process of their job was started with this rank: certain to be wrong."""
    key = str(membership.rank)
    first = understood(names.get(key), Present) if names.check([key]) else None
    # One that has just come may not have written its name yet; another job on the same port is no second one.
    if not first or (first.size, first.digest) == (membership.size, digest):
        two = Twice(rank=membership.rank, host=socket.gethostname(), pid=os.getpid())
        names.set("twice", two.model_dump_json())


def tell_of_outsider(names: Any, digest: str, what: str) -> None:
    """Tells all that wait that a process of their job ends, since its rank is none: a rank of theirs never comes."""
    outsider = Outsider(host=socket.gethostname(), pid=os.getpid(), digest=digest, what=what)
    names.set("outsider", outsider.model_dump_json())


def _refuse_outsider(names: Any, membership: Membership, digest: str) -> None:
    outsider = understood(names.get("outsider"), Outsider) if names.check(["outsider"]) else None
    if not outsider or outsider.digest != digest:
        return
    names.add("read", 1)
    who = f"process {outsider.pid} on {outsider.host}"
    raise _start_anew(f"{who} can't join: {outsider.what}", membership)


def _start_anew(what: str, membership: Membership) -> UserError:
    mend = (f"restart all processes, each with a unique rank from 0 to {membership.size - 1}",)
    return UserError(what, "--rank" if membership.started_by == "--init" else "RANK", mend)


def _refuse_two(names: Any, membership: Membership, present: dict[int, dict[str, Any]]) -> None:
    """Ends this process too where two were started with one rank: another rank must be missing, and never comes."""
    two = understood(names.get("twice"), Twice) if names.check(["twice"]) else None
    if not two or two.rank >= membership.size:
        return
    names.add("read", 1)
    first = present.get(two.rank)
    also = f" and to process {first['pid']} on {first['host']}" if first else ""
    what = f"rank {two.rank} was given twice: to process {two.pid} on {two.host}{also}"
    raise _start_anew(what, membership)


def linger(store: Any, key: str, count: int) -> None:
    """Waits until `count` processes have added themselves to a key, for a few seconds at most."""
    until = time.monotonic() + LINGER_S
    with contextlib.suppress(dist.DistError, RuntimeError):
        while store.add(key, 0) < count and time.monotonic() < until:
            time.sleep(0.02)


def _wait_for_names(names: Any, membership: Membership, digest: str, say: Say) -> dict[int, dict[str, Any]]:
    started, warned = time.monotonic(), False
    present: dict[int, dict[str, Any]] = {}
    while True:
        for rank in range(membership.size):
            if rank not in present and names.check([str(rank)]):
                said = understood(names.get(str(rank)), Present)
                if not said:
                    continue  # junk; the process itself, when it comes, writes over it
                present[rank] = said.model_dump()
                _refuse_dead(present[rank], rank, membership)
                if present[rank]["size"] != membership.size:
                    return present
        missing = [rank for rank in range(membership.size) if rank not in present]
        if not missing:
            return present
        _refuse_two(names, membership, present)
        _refuse_outsider(names, membership, digest)
        waited = time.monotonic() - started
        text = f"{len(present)} of {membership.size} processes are here; missing: rank {_ranges(missing)}"
        if waited > membership.join_timeout_s:
            raise PeerError(
                f"{text}, after {waited:.0f} s",
                _meeting_place(membership),
                (
                    "start the missing ranks with the same --init and --world-size"
                    if membership.started_by == "--init"
                    else "start the missing ranks on their machines, with the same job and the same list of machines",
                    "or wait longer: cluster.join_timeout_s",
                ),
            )
        if waited > membership.join_warn_s and not warned:
            warned = True
            say(f"{text}; giving up after {membership.join_timeout_s:.0f} s (cluster.join_timeout_s)")
        time.sleep(0.01 if waited < 5 else 0.2)


def _meeting_place(membership: Membership) -> str:
    if not membership.init.startswith("env://"):
        return membership.init
    return f"tcp://{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _refuse_dead(other: dict[str, Any], rank: int, membership: Membership) -> None:
    """An init file may hold the name of a process that has ended long ago."""
    here = other["machine"] == this_machine()
    if membership.init.startswith("file://") and here and not psutil.pid_exists(other["pid"]):
        path = membership.init.removeprefix("file://")
        what = f"the init file {path} is from an earlier run, whose rank {rank} (process {other['pid']}) has ended"
        raise UserError(what, "--init", (f"rm {path}, or use a new file name",))


def _compare(membership: Membership, me: dict[str, Any], rank: int, other: dict[str, Any]) -> None:
    words = {"size": "--world-size", "torch": "torch's version", "digest": "the job (flags or job.toml)"}
    for key, word in words.items():
        if me[key] != other[key]:
            shown = f": {me[key]} here, {other[key]} there" if key != "digest" else _options(me[key], other[key])
            what = f"rank {membership.rank} on {me['host']} and rank {rank} on {other['host']} differ in {word}{shown}"
            mend = ("start all ranks with the same command except for --rank",)
            raise UserError(what, _meeting_place(membership), mend)


def _options(here: str, there: str) -> str:
    """Names the options in which two jobs differ, and numbers of theirs; both are as `shared_options` writes them."""
    mine, others = _by_option(here), _by_option(there)
    told: list[str] = []
    for option, value in mine.items():
        other = others.get(option)
        if other == value:
            continue
        both = other is not None and _NUMBER.fullmatch(value) and _NUMBER.fullmatch(other)
        told.append(f"{option} ({value} here, {other} there)" if both else option)
    return f": {', '.join(told[:5])}{' …' * (len(told) > 5)}" if told else ""


def _by_option(words: str) -> dict[str, str]:
    return {option: value for option, _, value in (word.partition("=") for word in words.split())}


def _place_taken(names: Any, membership: Membership) -> UserError:
    """Another process has this rank: a second start, or an earlier run's init file."""
    other: Present | None = None
    with contextlib.suppress(RuntimeError, ValueError):
        # The other may have taken the place a moment ago and not have written its name yet.
        names.wait([str(membership.rank)], timedelta(seconds=LINGER_S))
        other = understood(names.get(str(membership.rank)), Present)
    who = f" by process {other.pid} on {other.host}" if other else ""
    if membership.init.startswith("file://"):
        path = membership.init.removeprefix("file://")
        return UserError(
            f"the init file {path} already has a rank {membership.rank}, written{who}",
            "--init",
            (
                f"if an earlier run left the file: rm {path}, or use a new file name",
                "or give each process its own --rank",
            ),
        )
    return UserError(
        f"rank {membership.rank} is taken{who}",
        "--rank",
        (f"give each process its own --rank, 0 to {membership.size - 1}",),
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
