"""The machines of a run: what state each is in, and the connections to their agents."""

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
from manyhands.core.timeouts import REQUEST_S, RETRY_LEAST_S


class State(Enum):
    """What a machine does for a run, and what its `RunMachine.until` means meanwhile."""

    LOST = "lost"  # no agent answers; until: the next contact
    CONTACTING = "contacting"  # its agent was started and is asked; until: the contact is given up
    READY = "ready"  # waits for the next start; until: it is excluded from starts
    RUNNING = "running"  # takes part in the run; its connection may be lost and replaced meanwhile


@dataclass(eq=False)
class RunMachine:
    """A machine of a run.

    Attributes:
        machine: its name and how it is reached.
        state: what it does now.
        until: the end of the state, by the monotonic clock; 0 if it has none.
        since: when it was lost, requested or excluded, by the monotonic clock.
        link: the connection to its agent.
        problem: why no agent answers.
        facts: what the agent said of the machine.
        device: the kind of device that is used.
        processes: number of processes that it runs.
        address: where the other machines reach it.
        opened: the run folder on it, as it was opened last.
        folder: the path of the run folder there, from its first start on.
        rank_group: its place among the machines of the last start that it took part in.
        generation: that start; -1 for none.
        added: it was added by `manyhands join`.
        on_trial: it has joined with the current start.
        other_records: its records of the run may differ from the launcher's.
        failures: number of failures in a row, each soon after it had begun to take part.
        since_step: the step from which on it takes part.
        notify: receives what has become of the request to add it, and whether it takes part.
        contact: asks the agent of a contacted machine one request after another.
        asked: the number of the request that was sent last, and the request.
    """

    machine: Machine
    state: State = State.CONTACTING
    until: float = 0.0
    since: float = field(default_factory=time.monotonic)
    link: AgentConnection | None = None
    problem: Contact | None = None
    facts: Facts = field(default_factory=dict[str, Any])
    device: str = ""
    processes: int = 0
    address: Address = field(default_factory=lambda: Address("", LOOPBACK))
    opened: RunOpened | None = None
    folder: str = ""
    rank_group: int = 0
    generation: int = -1
    added: bool = False
    on_trial: bool = False
    other_records: bool = False
    failures: int = 0
    since_step: int | None = None
    notify: Callable[[str, bool], object] = lambda _text, _takes_part: None
    contact: Generator[Request[Any], Any, None] | None = None
    asked: tuple[int, Request[Any]] | None = None

    @property
    def name(self) -> str:
        """Of the machine."""
        return self.machine.name

    @property
    def agent(self) -> AgentConnection:
        """The connection of a machine that takes part."""
        assert self.link
        return self.link

    @property
    def run(self) -> RunOpened:
        """The run folder of a machine that takes part."""
        assert self.opened
        return self.opened

    @property
    def requested(self) -> bool:
        """Whether the user waits for it to join."""
        return self.added and self.generation < 0

    def lose(self, pause_s: float = 0.0) -> None:
        """Ends the connection; the machine is contacted again after the pause, at once if it was just requested."""
        self.disconnect()
        self._leave(State.LOST)
        self.until = self.since + max(pause_s, 0.0 if self.requested else RETRY_LEAST_S)

    def exclude(self, pause_s: float) -> None:
        """Takes it out of the run; it can take part again after the pause."""
        self._leave(State.READY)
        self.until = self.since + pause_s

    def _leave(self, state: State) -> None:
        self.state, self.since, self.since_step = state, time.monotonic(), None
        self.on_trial, self.other_records = False, True

    def disconnect(self) -> None:
        """Ends the connection at once."""
        if self.link:
            self.link.close(0.0)
        self.link = self.contact = self.asked = None
        self.facts = {}


class Machines:
    """All machines of a run; those that take part are in the order of their ranks.

    Attributes:
        all: every machine, lost ones too.
    """

    def __init__(self, machines: list[RunMachine]) -> None:
        self.all = machines

    @property
    def running(self) -> list[RunMachine]:
        """The machines that take part."""
        return [machine for machine in self.all if machine.state is State.RUNNING]

    @property
    def waiting(self) -> list[RunMachine]:
        """The machines that don't take part, and may."""
        return [machine for machine in self.all if machine.state is not State.RUNNING]

    @property
    def links(self) -> list[AgentConnection]:
        """The connections of those that take part."""
        return [machine.agent for machine in self.running]

    @property
    def facts(self) -> dict[str, Facts]:
        """What the machines that take part said of themselves, by name."""
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
        """Asks machines, each its own request, while the others receive heartbeats.

        Raises:
            RunError: a machine is gone, or its request failed.
        """
        answers: dict[RunMachine, R] = {}
        for machine, answer in self._ask(requests, timeout_s).items():
            if isinstance(answer, RunError):
                raise answer
            answers[machine] = answer
        return answers

    def ask_each(self, request: Request[R], timeout_s: float = REQUEST_S) -> dict[RunMachine, R]:
        """Asks every machine that takes part the same; see `ask`."""
        return self.ask(dict.fromkeys(self.running, request), timeout_s)

    def ask_named(self, requests: Mapping[str, Request[R]], timeout_s: float) -> dict[str, R | RunError]:
        """Asks machines by name; returns for each its answer or error."""
        asked = {machine: requests[machine.name] for machine in self.running if machine.name in requests}
        return {machine.name: answer for machine, answer in self._ask(asked, timeout_s).items()}

    def _ask(self, requests: Mapping[RunMachine, Request[R]], timeout_s: float) -> dict[RunMachine, R | RunError]:
        asked = {machine.agent: request for machine, request in requests.items()}
        answers = ask_all(asked, timeout_s, self.links)
        return {machine: answers[machine.agent] for machine in requests}

    def require_all(self) -> None:
        """Raises RunError, with what can be done, if a machine's agent doesn't answer."""
        problems = self.problems
        if not problems:
            return
        if len(problems) == 1:
            ((host, contact),) = problems.items()
            error = RunError(contact.what, host, contact.hints)
        else:
            lines = tuple(f"{contact.what}: {contact.hints[0]}" for contact in problems.values())
            error = RunError(f"{len(problems)} machines can't be used", ", ".join(problems), lines)
        error.exit_code = EXIT_DOCTOR
        raise error

    def close(self, patience_s: float = 5.0) -> None:
        """Closes all connections."""
        close_all([machine.link for machine in self.all if machine.link], patience_s)
