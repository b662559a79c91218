"""The machines of a run, their states, and the connections to their agents."""

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from manyhands.cluster.agents.connection import AgentConnection, ask_all, close_all
from manyhands.cluster.agents.protocol import RunOpened
from manyhands.cluster.doctor.findings import Contact, Facts
from manyhands.cluster.hosts.inventory import LOOPBACK, Address, Machine
from manyhands.cluster.messages import R, Request
from manyhands.core.errors import EXIT_DOCTOR, RunError
from manyhands.core.timeouts import EXCLUDED_MOST_S, EXCLUDED_S, REQUEST_S, RETRY_LEAST_S

# A machine that fails within so many saved updates after it began to take part was of no use.
SOON_UPDATES = 20


class MachineState(Enum):
    """The state of a machine in a run, and the meaning of `RunMachine.until` in it."""

    LOST = "lost"  # no agent answers; until: the next contact
    CONTACTING = "contacting"  # its agent was started and answers requests; until: the launcher gives up
    READY = "ready"  # waits for the next start; until: it is excluded from starts before
    RUNNING = "running"  # takes part; the link itself reconnects for SILENT_S


@dataclass(eq=False)
class RunMachine:
    """The state of a machine, and of the connection to its agent, over the starts of a run."""

    spec: Machine  # its name, how it is reached, and its slots
    state: MachineState = MachineState.CONTACTING
    until: float = 0.0  # when the state ends, by the monotonic clock; 0 if that is not known
    since: float = field(default_factory=time.monotonic)  # when it was lost, requested or excluded
    link: AgentConnection | None = None
    problem: Contact | None = None  # why no agent answered
    facts: Facts = field(default_factory=dict[str, Any], repr=False)  # what the agent reported about the machine
    device: str = ""  # the kind of device that is used
    processes: int = 0
    address: Address = field(default_factory=lambda: Address("", LOOPBACK))  # where the other machines reach it
    opened_folder: RunOpened | None = None  # the run folder on it, as it was opened last
    folder: str = ""  # the path of the run folder there, from its first start on
    position: int = 0  # its place among the machines of the last start that it took part in
    generation: int = -1  # that start; -1 for none
    requested: bool = False  # the user waits for it to join
    added: bool = False  # it joined on request of the user
    joined: bool = False  # it joined with the current start
    records_may_differ: bool = False  # its records of the run may differ from the launcher's
    failures: int = 0  # number of failures since it was last of use
    since_step: int | None = None  # the saved step at which it began to take part
    # receives how the request to add it ended, and whether it takes part
    notify: Callable[[str, bool], object] = lambda _text, _takes_part: None
    # the requests to the agent of a machine that is contacted, one after another
    contact: Generator[Request[Any], Any, None] | None = None
    asked: tuple[int, Request[Any]] | None = None  # the number of the request that was sent last, and the request

    @property
    def name(self) -> str:
        """The host name, which is unique in a run."""
        return self.spec.name

    @property
    def agent(self) -> AgentConnection:
        """The connection to its agent, which must exist."""
        assert self.link
        return self.link

    @property
    def run_folder(self) -> RunOpened:
        """The run folder on it, which must have been opened."""
        assert self.opened_folder
        return self.opened_folder

    def count_failure(self, step: int) -> float:
        """Counts a failure at the saved step `step`; returns for how many seconds to exclude the machine, or 0."""
        useful = self.since_step is not None and step - self.since_step >= SOON_UPDATES
        self.failures, self.since_step = 1 if useful else self.failures + 1, None
        return min(EXCLUDED_MOST_S, EXCLUDED_S * 2 ** (self.failures - 2)) if self.failures > 1 else 0.0

    def lose(self, pause_s: float = 0.0) -> None:
        """Ends the connection; the machine is contacted again after the pause, or at once if it was requested."""
        self._leave(MachineState.LOST)
        self.until = self.since + max(pause_s, 0.0 if self.requested else RETRY_LEAST_S)
        self.disconnect()

    def exclude(self, pause_s: float) -> None:
        """Removes it from the run; it can take part again after the pause."""
        self._leave(MachineState.READY)
        self.until = self.since + pause_s

    def _leave(self, state: MachineState) -> None:
        self.state, self.since, self.since_step = state, time.monotonic(), None
        self.joined, self.records_may_differ = False, True

    def disconnect(self) -> None:
        """Ends the connection at once."""
        link, self.link, self.facts = self.link, None, {}
        self.contact = self.asked = None
        if link:
            link.close(0.0)


class Machines:
    """All machines of a run, lost ones too; those that take part are in the order of their ranks."""

    def __init__(self, machines: list[RunMachine]) -> None:
        self.all = machines

    @property
    def running(self) -> list[RunMachine]:
        """The machines that take part."""
        return [machine for machine in self.all if machine.state is MachineState.RUNNING]

    @property
    def waiting(self) -> list[RunMachine]:
        """The machines that don't take part, and may."""
        return [machine for machine in self.all if machine.state is not MachineState.RUNNING]

    @property
    def links(self) -> list[AgentConnection]:
        """The connections of those that take part."""
        return [machine.agent for machine in self.running]

    @property
    def facts(self) -> dict[str, Facts]:
        """The facts about the machines that take part, by name."""
        return {machine.name: machine.facts for machine in self.running}

    @property
    def problems(self) -> dict[str, Contact]:
        """Why machines don't answer, by name."""
        return {machine.name: machine.problem for machine in self.all if machine.problem}

    def heartbeat(self) -> None:
        """Sends a heartbeat to each machine that takes part, if one is due."""
        for link in self.links:
            link.heartbeat()

    def ask(self, requests: Mapping[RunMachine, Request[R]], timeout_s: float = REQUEST_S) -> dict[RunMachine, R]:
        """Asks machines, each its own request. Raises RunError: a machine is lost, or its request failed."""
        asked, answers = {machine.agent: machine for machine in requests}, dict[RunMachine, R]()
        found = ask_all({link: requests[machine] for link, machine in asked.items()}, timeout_s, self.links)
        for link, answer in found.items():
            if isinstance(answer, RunError):
                raise answer
            answers[asked[link]] = answer
        return answers

    def ask_each(self, request: Request[R], timeout_s: float = REQUEST_S) -> dict[RunMachine, R]:
        """Asks every machine that takes part the same."""
        return self.ask(dict.fromkeys(self.running, request), timeout_s)

    def ask_named(self, requests: Mapping[str, Request[R]], timeout_s: float) -> dict[str, R | RunError]:
        """Asks machines by name; returns for each its answer or error."""
        asked = {machine.agent: requests[machine.name] for machine in self.running if machine.name in requests}
        return {link.machine.name: answer for link, answer in ask_all(asked, timeout_s, self.links).items()}

    def require_all(self) -> None:
        """Raises RunError, with hints, if a machine's agent doesn't answer."""
        if not (problems := self.problems):
            return
        (what, hints), *others = ((contact.what, contact.hints) for contact in problems.values())
        if others:
            hints = tuple(f"{contact.what}: {contact.hints[0]}" for contact in problems.values())
            what = f"{len(problems)} machines can't be used"
        error = RunError(what, ", ".join(problems), hints)
        error.exit_code = EXIT_DOCTOR
        raise error

    def close(self, patience_s: float = 5.0) -> None:
        """Closes all connections."""
        close_all([machine.link for machine in self.all if machine.link], patience_s)
