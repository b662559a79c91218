"""Types for the survey of a job's machines and for findings; runs all checks and keeps one finding per cause."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from manyhands.core.choices import load_choice, module_names
from manyhands.core.errors import RunError

CHECKS = "manyhands.cluster.doctor.checks"

Facts = Mapping[str, Any]  # JSON data about a machine, from `facts.gather_facts`; an undetermined fact is missing
Severity = Literal["fail", "warn", "ok"]
Reached = Literal["ok", "refused", "timeout", "unreachable", "other"]
Pair = tuple[str, str]
Value = TypeVar("Value", bound=Hashable)

WORST_FIRST = ("fail", "warn", "ok")
# Order of findings with the same severity: problems that hide others come first.
ORDER = ("contact", "twice", "reach", "interface", "port", "accelerators", "versions", "data", "code", "memory", "disk",
         "collective", "links", "names", "jobs", "cpu", "clock", "facts")  # fmt: skip


@dataclass(frozen=True)
class FactsWanted:
    """The parameters of a request for facts about a machine."""

    workdir: str = ""  # of the job; empty for the agent's working folder
    runs: str = ""  # parent of the run folders; empty for the default
    data: str = ""  # as the job names it; empty for none
    data_dir: str = ""  # data.dir of the job
    torch: bool = False  # also ask torch about accelerators, which takes seconds
    only: tuple[str, ...] = ()  # names of the facts to gather; empty for all


@dataclass(frozen=True)
class Attempt:
    """The result of a machine's attempt to connect to one of the addresses of another machine."""

    address: str  # of the other machine
    # timeout: no answer; refused: nothing listens, or a firewall rejects; other: another program or machine answers
    result: Reached
    local: str = ""  # the source address; empty without a connection
    latency_ms: float | None = None  # median round trip of a small message
    port: int = 0  # of the other machine


@dataclass(frozen=True)
class Needs:
    """A job's requirements for its machines."""

    processes: Mapping[str, int] = field(default_factory=dict)  # on each host; 1 for a missing host
    threads: int = 0  # of each process; 0: cores divided by processes
    port: int = 0  # of the rendezvous; 0: any
    interface: str = ""  # as the job names it; empty: found by testing
    through_ssh: bool = False  # True if the machines connect only through ssh
    download: bool = True  # a missing named data set may be downloaded
    files: tuple[str, ...] = ()  # the user's own files that the job names, by their path in the work folder
    device: str = "auto"  # auto, or torch's name of a device
    reach: Mapping[str, str] = field(default_factory=dict)  # by host: the ssh command that reaches it from here


@dataclass(frozen=True)
class DoctorFinding:
    """A problem, or the result of a passed check."""

    check: str  # name of the check, for scripts
    severity: Severity  # fail: training would fail; warn: training would be slower or less reliable
    hosts: tuple[str, ...]  # the machines with the problem
    what: str  # the fact in one sentence
    hints: tuple[str, ...] = ()  # hints, with a command if possible
    cause: str = ""  # of several findings with the same cause, only the worst is shown
    explains: tuple[str, ...] = ()  # causes that follow from this finding and are hidden


@dataclass
class Survey:
    """The data about a job's machines, from which the checks derive findings."""

    hosts: tuple[str, ...]  # in rank order; a single host means this machine
    facts: dict[str, Facts] = field(default_factory=dict)  # of each machine that answers
    errors: dict[str, RunError] = field(default_factory=dict)  # why machines don't answer
    # by (from, to): one attempt for each address of the second machine
    reach: dict[Pair, tuple[Attempt, ...]] = field(default_factory=dict)
    chosen: dict[str, tuple[str, str]] = field(default_factory=dict)  # each machine's interface and address for others
    mbps: dict[Pair, float] = field(default_factory=dict)  # by (from, to): measured bandwidth in Mbit/s
    latency_ms: dict[Pair, float] = field(default_factory=dict)  # by (from, to): median round trip of a small message
    # seconds that each machine's clock is ahead of this machine's, and the error of that offset
    clock_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    port_errors: dict[str, str] = field(default_factory=dict)  # why the rendezvous port can't be used on a host
    collective: DoctorFinding | None = None  # result of a real all-reduce; None if not all machines could take part
    needs: Needs = field(default_factory=Needs)  # of the job

    def fact(self, *path: str) -> dict[str, Any]:
        """Returns {host: fact at the nested keys `path`} for the machines that have this fact, in rank order."""
        found: dict[str, Any] = {host: self.facts.get(host) for host in self.hosts}
        for key in path:
            found = {host: value.get(key) for host, value in found.items() if isinstance(value, Mapping)}
        return {host: value for host, value in found.items() if value is not None}

    def on_host(self, host: str, command: str) -> str:
        """Returns the command line to run `command` on a host: with ssh, unless only this machine is examined."""
        return command if len(self.hosts) == 1 else f"{self.needs.reach.get(host, f'ssh {host}')} {command}"


def examine(survey: Survey) -> list[DoctorFinding]:
    """Runs all checks on a survey; returns one finding for each cause, the worst first."""
    found = [finding for name in module_names(CHECKS) for finding in load_choice(CHECKS, name).run(survey)]
    return merge_findings(found + ([survey.collective] if survey.collective else []))


def merge_findings(found: list[DoctorFinding]) -> list[DoctorFinding]:
    """Returns one finding for each cause, the worst first, without findings that another finding explains."""
    explained = {cause for finding in found if finding.severity != "ok" for cause in finding.explains}
    by_cause: dict[str, DoctorFinding] = {}
    order = (*ORDER, *(finding.check for finding in found))  # a new check's findings come last
    for finding in sorted(found, key=lambda each: (WORST_FIRST.index(each.severity), order.index(each.check))):
        cause = finding.cause or f"{finding.check}:{finding.what}"
        if cause not in explained:
            by_cause.setdefault(cause, finding)
    return list(by_cause.values())


def any_failed(found: list[DoctorFinding]) -> bool:
    return any(finding.severity == "fail" for finding in found)


def find_outliers(values: Mapping[str, Value]) -> tuple[Value | None, dict[str, Value]]:
    """Returns (most common value, {host: value} of the other hosts). Of equally common values, the first one counts."""
    common = max(values.values(), key=Counter(values.values()).__getitem__, default=None)
    return common, {host: value for host, value in values.items() if value != common}


def join_hosts(hosts: Iterable[str]) -> str:
    """Joins host names for a message: "n1", "n1 and n2", "n1, n2 and n3"."""
    names = list(hosts)
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""
