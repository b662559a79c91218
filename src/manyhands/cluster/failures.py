"""Collects the results of a run's processes, and finds and reports the first cause of a failure."""

import contextlib
import platform
import re
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from manyhands.core.errors import EXIT_USAGE, ManyhandsError, RunError, UserError
from manyhands.core.records import MACHINE_LOST, PROCESS_ENDED, Failure


class Failed(Exception):  # noqa: N818 - carries a failure record
    """Raised to end a process after it has written its failure record."""

    def __init__(self, record: Failure) -> None:
        super().__init__(record.what)
        self.record = record


def user_code_location(record: Failure) -> str:
    """Returns "file:line" of the user's code that raised a failure; an empty string if the record has no traceback."""
    lines = re.findall(r'File "([^"\n]+)", line (\d+)', record.excerpt)
    return ":".join(lines[-1]) if lines else ""


def error_of_record(record: Failure) -> ManyhandsError:
    """Converts a failure record to an error, with the user's part of the traceback as a note."""
    step = f", step {record.step}" if record.step is not None else ""
    line = user_code_location(record)
    rank = f"rank {record.rank} on {record.host}{step}{record.phase and f' ({record.phase})'}"
    where = record.where or f"{rank}{line and f', at {line}'}"
    if record.where and record.host not in {"", record.where, platform.node()}:
        where += f" on {record.host}"
    kind = UserError if record.exit_code == EXIT_USAGE else RunError
    error = kind(record.what, where, tuple(record.hints))
    error.exit_code = record.exit_code
    if record.excerpt:
        error.add_note(record.excerpt)
    return error


# torch prints this warning in networks without reverse DNS; it explains no failure.
_UNRELATED = "hostname of the client socket cannot be retrieved"


@dataclass
class Ending:
    """The results of one start of a run's workers. Dicts are keyed by rank, unless noted."""

    returned: dict[int, Any] = field(default_factory=dict[int, Any])  # results
    failed: dict[int, int] = field(default_factory=dict[int, int])  # exit codes; -n if signal n killed the process
    records: dict[int, Failure] = field(default_factory=dict[int, Failure])  # written by failed processes
    words: dict[int, str] = field(default_factory=dict[int, str])  # last log lines of failed processes without a record
    hosts: dict[int, str] = field(default_factory=dict[int, str])  # the machines of failed processes
    lost: dict[str, str] = field(default_factory=dict[str, str])  # why machines were lost, by host name
    paused_s: float = 0.0  # seconds that the launcher was suspended, if that lost machines
    lost_tunnel: str = ""  # the message about a tunnel between machines that has ended
    evicted: dict[int, str] = field(default_factory=dict[int, str])  # why the launcher killed ranks that hung
    hung: str = ""  # why a stop request had no effect, so that the processes were killed
    interrupted: int = 0  # number of stop requests
    replaced: str = ""  # the message about a newer launcher that has taken over the machines
    regrouped: bool = False  # the launcher had the processes save and exit, to restart them on other machines
    broken: str = ""  # the traceback or message of an agent that failed
    refused: ManyhandsError | None = None  # the error of an agent that could not carry out its orders

    @property
    def ok(self) -> bool:
        """True if processes have returned results and nothing has failed."""
        return bool(self.returned) and not (self.failed or self.broken or self.lost or self.lost_tunnel or self.refused)


def first_cause(ending: Ending) -> Failure | None:
    """Returns the cause of a failed start. Prefers, in order: hung ranks, original failures, lost machines, tunnels."""
    records = sorted(ending.records.values(), key=lambda record: (record.consequence, record.time))
    if ending.evicted:
        rank, why = next(iter(ending.evicted.items()))
        return _kill_record(ending, rank, 0, why)
    if records and not records[0].consequence:
        # Of processes with the same error, prefer the rank that the error names.
        alike = [record for record in records if (record.what, record.where) == (records[0].what, records[0].where)]
        return next((record for record in alike if record.where.startswith(f"rank {record.rank},")), records[0])
    if ending.lost:
        hints = "keep the launcher's computer awake, or start the run with --detach"
        return _lost(*next(iter(ending.lost.items())), hints if ending.paused_s else "")
    if ending.lost_tunnel:
        return _lost("", ending.lost_tunnel, "check that both machines are running and the network between them works")
    for rank, exit_code in ending.failed.items():
        if rank not in ending.records:
            return _kill_record(ending, rank, exit_code)
    return records[0] if records else None


def _lost(host: str, how: str, hints: str = "") -> Failure:
    hints = hints or f"check that {host} is running, connected to the network and not out of memory"
    what, now = f"{host} is lost: {how}" if host else how, time.time()
    return Failure(time=now, rank=0, host=host, pid=0, error=MACHINE_LOST, what=what, where=host, hints=[hints])


def _kill_record(ending: Ending, rank: int, exit_code: int, why: str = "") -> Failure:
    """Creates a failure record for a process that wrote none."""
    output = "\n".join(line for line in ending.words.get(rank, "").splitlines() if _UNRELATED not in line)
    hints = [f"see the log of this rank: ranks/{rank}.log"]
    if exit_code == -signal.SIGKILL:
        hints = ["check `dmesg | tail` for an out-of-memory kill", "use fewer processes or a smaller train.micro_batch"]
    error = PROCESS_ENDED if why or exit_code < 0 else SystemExit.__name__
    what, host = why or f"rank {rank} {describe_exit(exit_code, worker=True)}", ending.hosts.get(rank, "")
    excerpt = output and f"last output of rank {rank}:\n{output}"
    return Failure(time=time.time(), rank=rank, host=host, pid=0, error=error, what=what, hints=hints, excerpt=excerpt)


def describe_exit(exit_code: int, *, worker: bool = False) -> str:
    """Describes how a process ended, for a message. `worker`: exit code 0 means that it returned no result."""
    with contextlib.suppress(ValueError):
        if exit_code < 0:
            return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}" + (" without returning a result" if worker and not exit_code else "")
