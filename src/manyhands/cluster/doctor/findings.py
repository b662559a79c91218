"""What is known of machines that shall work together, and what the doctor says about it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# Plain JSON data about one machine; `facts` says what is in it. A fact that couldn't be found is missing.
Facts = Mapping[str, Any]
Severity = Literal["fail", "warn", "ok"]
Reached = Literal["ok", "refused", "timeout", "unreachable", "other"]


@dataclass(frozen=True)
class Attempt:
    """One attempt of a machine to reach another at one of its addresses.

    Attributes:
        address: that was tried.
        result: refused: nothing listens there or a firewall rejects; timeout: no answer at all; unreachable: no way
            leads there; other: something answers that isn't our machine.
        local: the address that the attempt left from; empty where it didn't.
        latency_ms: of one small message and its answer, the median of several.
        port: that was tried.
    """

    address: str
    result: Reached
    local: str = ""
    latency_ms: float | None = None
    port: int = 0


@dataclass(frozen=True)
class Contact:
    """Why no agent answers from a machine.

    Attributes:
        kind: unknown-host, unreachable, refused, host-key, auth, no-manyhands, no-folder,
            other-version or other.
        what: one sentence.
        mend: what to do about it.
    """

    kind: str
    what: str
    mend: tuple[str, ...] = ()


@dataclass(frozen=True)
class AllReduceTest:
    """How a real all-reduce over all machines went.

    Attributes:
        result: skipped: not all machines could take part.
        said: the first cause, where it failed.
        seconds: it took to meet and to add up, without torch's import.
        missing: hosts that did not arrive.
    """

    result: Literal["ok", "failed", "skipped"]
    said: str = ""
    seconds: float = 0.0
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Needs:
    """What the job asks of the machines.

    Attributes:
        processes: on each host; a host that isn't named runs one.
        threads: of each process; 0: cores divided by processes.
        port: that the job names; 0: any.
        interface: that the job names; empty: found by trying.
        data: what the user called the data; empty: nothing to compare.
        download: a named data set may be fetched where it is missing.
        code: the job uses the user's own Python files.
        files: the user's own files that the job names, by their path in the work folder.
        device: "auto", "cpu", "cuda", "npu" …
        reach: host to the command that reaches it from here: the user's ssh, with port and user.
    """

    processes: Mapping[str, int] = field(default_factory=dict)
    threads: int = 0
    port: int = 0
    interface: str = ""
    data: str = ""
    download: bool = True
    code: bool = False
    files: tuple[str, ...] = ()
    device: str = "auto"
    reach: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Survey:
    """All that was found out, for the checks to judge.

    Attributes:
        hosts: in the order of their ranks; one alone means this machine.
        facts: of each machine that could be asked.
        errors: why the others could not.
        reach: (from, to) to the attempts, one for each address of the second.
        chosen: the interface and address that each machine is to be reached at.
        mbps: (from, to) to what went through.
        latency_ms: (from, to) to the median of a small message and its answer.
        clock_s: how far each clock is ahead of the asking machine's, and how uncertain that is.
        port_errors: host to why the port that the job names can't be used there.
        collective: the real one; None where it wasn't tried.
        needs: of the job.
    """

    hosts: tuple[str, ...]
    facts: dict[str, Facts] = field(default_factory=dict)
    errors: dict[str, Contact] = field(default_factory=dict)
    reach: dict[tuple[str, str], tuple[Attempt, ...]] = field(default_factory=dict)
    chosen: dict[str, tuple[str, str]] = field(default_factory=dict)
    mbps: dict[tuple[str, str], float] = field(default_factory=dict)
    latency_ms: dict[tuple[str, str], float] = field(default_factory=dict)
    clock_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    port_errors: dict[str, str] = field(default_factory=dict)
    collective: AllReduceTest | None = None
    needs: Needs = field(default_factory=Needs)


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that is wrong, or is as it should be.

    Attributes:
        check: the file in `cluster/doctor/checks/` that found it.
        severity: fail: training would fail; warn: it would work, but worse than it could.
        hosts: that it is about.
        what: one sentence.
        mend: what to do, a command where there is one.
        cause: findings with the same cause are one; the worst is shown.
        explains: causes that are mere consequences of this one and aren't shown beside it.
    """

    check: str
    severity: Severity
    hosts: tuple[str, ...]
    what: str
    mend: tuple[str, ...] = ()
    cause: str = ""
    explains: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {**asdict(self), "hosts": list(self.hosts), "mend": list(self.mend), "explains": list(self.explains)}
