"""Machines that come back to a run, or are added to it, while it goes on: looked over here until they can take part."""

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.assemble import clock_offset, open_agent
from manyhands.cluster.agents.claim import run_id
from manyhands.cluster.agents.connection import AgentConnection, LinkClosed, answer_to
from manyhands.cluster.agents.ssh import explain_contact
from manyhands.cluster.doctor.findings import Facts
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import Request, call
from manyhands.config.job import Job
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import CONTACT_S, RETRY_LEAST_S, RETRY_MOST_S, SILENT_S
from manyhands.run.doctor import facts_wanted

# The pause between two attempts is this part of the time that a machine has been lost.
PAUSE = 0.02
# Waiting for it: the agent of a machine that was cut off has its processes still.
BUSY = "is still ending its earlier processes"


@dataclass(frozen=True)
class RejoinInfo:
    """A machine's part in a run: for one that comes back, the part that it had."""

    folder: str  # the run folder there
    machine: int = 0  # its place among the machines of the last start that it took part in
    generation: int = -1  # that start; -1 for none


@dataclass(eq=False)
class PendingMachine:
    """One machine that is to take part."""

    machine: Machine  # which
    part: RejoinInfo  # what is known of its part
    # is given what has become of it, and whether it takes part
    notify: Callable[[str, bool], object] = lambda _text, _takes_part: None
    asked_for: bool = False  # by the user; else the machine was lost
    since: float = field(default_factory=time.monotonic)  # when it was lost or asked for, by the monotonic clock
    not_before: float = 0.0  # it is set aside until then
    link: AgentConnection | None = None  # the conversation with its agent, while there is one
    facts: Facts = field(default_factory=dict[str, Any])  # what it said of itself
    clock_offset_s: float = 0.0
    ready: tuple[str, int] | None = None  # the device and the number of processes, once it can take part
    try_at: float = 0.0
    until: float = 0.0
    steps: Generator[Request[Any], Any, tuple[str, int]] | None = None
    question: tuple[int, Request[Any]] | None = None

    @property
    def name(self) -> str:
        """Of the machine."""
        return self.machine.name

    def close(self, patience_s: float = 0.0) -> None:
        """Ends the conversation."""
        if self.link:
            self.link.close(patience_s)
        self.link = self.steps = self.question = self.ready = None


class RefusedError(ManyhandsError):
    """This machine can't take part, and trying again would not change that."""


class PendingMachines:
    """All machines that are to take part, and do not yet. Nothing here waits.

    Args:
        job: what they are to do.
        folder: the run's.
        judge: raises RefusedError for what would keep a machine from taking part, from what it says of itself.
        say: tells the user, a sentence and its level.

    Attributes:
        code: files that each is to have.
        term: of this head; 0 where the run isn't detached.
        replaced_on: a machine on which another head is obeyed.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        judge: Callable[[Machine, Facts], None],
        say: Callable[[str, str], object],
    ) -> None:
        self._job, self._folder, self._judge, self._say = job, folder, judge, say
        self._all: list[PendingMachine] = []
        self.code: Mapping[str, str] = {}
        self.term, self.replaced_on = 0, ""

    def add(self, pending_machine: PendingMachine) -> None:
        """Tries from now on to have this machine take part."""
        pending_machine.try_at = pending_machine.since + RETRY_LEAST_S if not pending_machine.asked_for else 0.0
        self._all.append(pending_machine)

    def names(self) -> list[str]:
        """Of all that are to take part."""
        return [one.name for one in self._all]

    @property
    def can_come(self) -> list[PendingMachine]:
        """Those that can take part now; none while another is about to be ready too, so that one pause serves both."""
        now = time.monotonic()
        coming = [one for one in self._all if one.facts and one.link and not one.ready]
        ready = [one for one in self._all if one.ready and now >= one.not_before]
        return [] if coming else ready

    def take(self, most: int) -> list[PendingMachine]:
        """Gives away up to so many that can take part."""
        now = time.monotonic()
        taken = [one for one in self._all if one.ready and now >= one.not_before][:most]
        self._all = [one for one in self._all if one not in taken]
        return taken

    def refuse(self, pending_machine: PendingMachine, error: ManyhandsError) -> None:
        """Tells the user why a machine doesn't take part, which is not tried again."""
        pending_machine.close()
        self._all = [one for one in self._all if one is not pending_machine]
        hints = f" ({'; or '.join(error.hints)})" if error.hints else ""
        text = f"{pending_machine.name} can't join: {error.message}{hints}"
        self._say(text, "WARNING")
        pending_machine.notify(text, False)

    def tick(self) -> None:
        """Goes on with each as far as that is possible without waiting."""
        for one in list(self._all):
            try:
                self._continue(one)
            except (LinkClosed, OSError):  # no answer in time, or no memory or files here to ask with
                self._later(one)
            except (RefusedError, RunError, UserError) as error:
                self.refuse(one, error)

    def close(self) -> None:
        """Lets go of all."""
        for one in self._all:
            one.close()
            one.notify(f"the run ended before {one.name} joined", False)
        self._all = []

    def _continue(self, one: PendingMachine) -> None:
        now = time.monotonic()
        if one.link is None:
            if now < one.try_at:
                return
            link = one.link = open_agent(one.machine, self._job.cluster, self._folder.ranks)
            one.until, one.steps = now + CONTACT_S, self._meet(one, link)
            one.question = _asked(link, next(one.steps))
        one.link.heartbeat()
        one.link.flush()
        if one.question is None:
            _make_sure(one, one.link)
            return
        answers = answer_to(one.link, *one.question)
        if not answers:
            if now > one.until:
                raise TimeoutError(f"{one.name} did not answer within {CONTACT_S:.0f} s")
            return
        (answer,) = answers
        if isinstance(answer, RunError):
            raise answer
        try:
            assert one.steps
            one.question = _asked(one.link, one.steps.send(answer))
        except StopIteration as over:
            one.ready, one.question = over.value, None

    def _meet(self, one: PendingMachine, link: AgentConnection) -> Generator[Request[Any], Any, tuple[str, int]]:
        """Everything that is asked of a machine before it takes part, but for what all machines are needed for."""
        asked = time.time()
        facts = yield call(Agent.hello, facts_wanted(self._job), not link.here)
        one.clock_offset_s = clock_offset(facts.get("time", 0.0), asked)
        self._judge(one.machine, facts)
        one.facts = facts
        part = one.part
        run = run_id(self._folder)
        seen = yield call(Agent.inspect_run, part.folder, part.machine, part.generation, run, self.term)
        if self.term and seen.run == run and seen.term > self.term:
            self.replaced_on = one.name
            raise TimeoutError(f"{one.name} belongs to another launcher")
        if seen.busy:
            raise TimeoutError(f"{one.name} {BUSY}")
        if seen.checkpoints and seen.run != run:
            what = f"{part.folder} on that machine holds another run"
            raise RefusedError(what, hints=("move that folder away",))
        if self.code and not link.here:
            yield call(Agent.take_code, dict(self.code))
        slots = one.machine.slots
        prepared = yield call(Agent.prepare, slots, self._job.cluster.threads, self._job.cluster.device)
        if slots > prepared.count and prepared.device not in {"cpu", "mps"}:
            raise RefusedError(
                f"{slots} processes are requested, but the machine has {prepared.count} {prepared.device} devices"
            )
        return prepared.device, slots or prepared.count

    def _later(self, one: PendingMachine) -> None:
        """The next attempt comes after a pause that grows; a machine that was never there is told of at once."""
        if one.asked_for and one.link and not one.facts:
            contact = explain_contact(one.machine, one.link.close(), one.link.log_tail(), self._job.cluster)
            self.refuse(one, RefusedError(contact.what, hints=contact.hints))
            return
        one.close()
        one.facts = {}
        now = time.monotonic()
        one.try_at = max(now + min(max(RETRY_LEAST_S, PAUSE * (now - one.since)), RETRY_MOST_S), one.not_before)


def _asked(link: AgentConnection, request: Request[Any]) -> tuple[int, Request[Any]]:
    return link.post(request), request


def _make_sure(one: PendingMachine, link: AgentConnection) -> None:
    """Raises TimeoutError: a machine that was ready is lost again."""
    link.read()
    if link.closed or (not link.here and time.monotonic() - link.last_received > SILENT_S):
        raise TimeoutError(f"{one.name} was lost again")
