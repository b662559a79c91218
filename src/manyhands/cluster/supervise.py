"""Watches an agent from its head: passes on Ctrl-C, waits for the end, and finds the first cause of a failure."""

import contextlib
import json
import platform
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from manyhands.core.records import Failure

POLL_S = 0.1
# After a second Ctrl-C the agent has this long to kill its workers.
KILL_S = 10.0
# Lines that are shown of what a killed process wrote.
LAST_WORDS = 8


@dataclass
class Ending:
    """How the processes ended.

    Attributes:
        returned: rank to what its entry returned.
        failed: rank to exit code (negative: the signal that killed it), as the agent saw it.
        interrupted: True when the user (or the system) asked for a stop.
        broken: the agent's own traceback, if it failed itself.
    """

    returned: dict[int, Any] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    interrupted: bool = False
    broken: str = ""

    @property
    def ok(self) -> bool:
        """True when every process came to its end by itself."""
        return bool(self.returned) and not self.failed and not self.broken


def supervise(
    agent: subprocess.Popen[str], on_tick: Callable[[], None], on_stop: Callable[[], None] = lambda: None
) -> Ending:
    """Waits for the agent's end, calling `on_tick` a few times a second, and `on_stop` at each wish to stop.

    The first SIGINT or SIGTERM asks the workers to save and leave, the second kills them.
    """
    ending = Ending()
    with _closed_in_the_end(agent), _signals_counted() as signals, selectors.DefaultSelector() as selector:
        assert agent.stdout is not None
        selector.register(agent.stdout, selectors.EVENT_READ)
        passed_on, kill_at = 0, float("inf")
        while True:
            if selector.select(POLL_S):
                line = agent.stdout.readline()
                if not line:
                    break
                _take_in(line, ending)
            if len(signals) > passed_on:
                passed_on = len(signals)
                ending.interrupted = True
                _command(agent, "stop" if passed_on == 1 else "kill")
                on_stop()
                kill_at = kill_at if passed_on == 1 else time.monotonic() + KILL_S
            if time.monotonic() > kill_at:
                agent.kill()
            on_tick()
    on_tick()
    if not ending.returned and not ending.failed and not ending.broken:
        ending.broken = f"it {_how(agent.returncode)}"
    return ending


@contextlib.contextmanager
def _closed_in_the_end(agent: subprocess.Popen[str]) -> Iterator[None]:
    """Closes the agent's pipes, which ends it if it hasn't ended, and waits for it."""
    assert agent.stdin is not None
    assert agent.stdout is not None
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            agent.stdin.close()
        agent.wait()
        agent.stdout.close()


@contextlib.contextmanager
def _signals_counted() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP instead of being ended by them; only possible on the main thread."""
    seen: list[int] = []
    previous: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):
            previous[number] = signal.signal(number, lambda number, _frame: seen.append(number))
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _command(agent: subprocess.Popen[str], word: str) -> None:
    assert agent.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        agent.stdin.write(word + "\n")
        agent.stdin.flush()


def _take_in(line: str, ending: Ending) -> None:
    if not line.startswith('{"kind"'):
        return  # some libraries greet on standard output when they are loaded
    message = json.loads(line)
    if message["kind"] == "ended":
        ending.returned = {int(rank): value for rank, value in message["returned"].items()}
        ending.failed = {int(rank): failure for rank, failure in message["failed"].items()}
        if not ending.returned and not ending.failed:
            ending.broken = f"the processes were ended ({message.get('signal', 'they did not stop in time')})"
    elif message["kind"] == "broken":
        ending.broken = message["traceback"]


def first_cause(folder: Path, ending: Ending) -> Failure | None:
    """The failure that caused the others: the earliest that is no mere consequence, or a process that was killed."""
    records: list[Failure] = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValidationError):
            records.append(Failure.model_validate_json(path.read_text(encoding="utf-8")))
    records.sort(key=lambda record: (record.consequence, record.time))
    if records and not records[0].consequence:
        return records[0]
    silent = [rank for rank in ending.failed if rank not in {record.rank for record in records}]
    if silent:
        return _killed(silent[0], ending.failed[silent[0]], folder.parent / f"{silent[0]}.log")
    return records[0] if records else None


def _killed(rank: int, exit_code: int, log: Path) -> Failure:
    """The record of a process that could not write its own."""
    mend: list[str] = []
    if exit_code == -signal.SIGKILL:
        mend = [
            "was it killed for memory? see `dmesg | tail`; fewer processes or a smaller train.micro_batch need less"
        ]
    said = ""
    with contextlib.suppress(OSError):
        said = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_WORDS:])
    return Failure(
        time=time.time(),
        rank=rank,
        host=platform.node(),
        pid=0,
        error="ProcessEnded",
        what=f"rank {rank} {_how(exit_code)}",
        mend=mend or [f"what it wrote is in {log}"],
        excerpt=said and f"rank {rank} wrote last:\n{said}",
    )


def _how(exit_code: int) -> str:
    """How a process ended, from its exit code; a negative one is the signal that killed it."""
    with contextlib.suppress(ValueError):
        if exit_code < 0:
            return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
