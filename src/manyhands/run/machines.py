"""The machines of a launched run: who takes part, and who is lost, contacted, ready or excluded.

RUNNING -> LOST         its connection ended or was silent, and it was not reconnected
RUNNING -> READY        it failed again soon and can be spared: excluded for a while
LOST -> CONTACTING      the pause before the next contact is over
CONTACTING -> READY     everything that it was asked is answered
CONTACTING -> LOST      no answer
READY -> RUNNING        the next start takes it in, on trial until that start has made an update
READY -> LOST           its connection ended or was silent
CONTACTING, READY, or RUNNING on trial -> refused for good: it can't take part, or the start with it failed
"""

import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from manyhands.checkpoint.saved import saved_step
from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.assemble import clock_offset, open_agent
from manyhands.cluster.agents.claim import run_id, term_in
from manyhands.cluster.agents.connection import AgentConnection, LinkClosed, answer_to
from manyhands.cluster.agents.ending import Ending, first_cause
from manyhands.cluster.agents.machines import Machines, RunMachine, State
from manyhands.cluster.agents.ssh import explain_contact
from manyhands.cluster.doctor.findings import Facts, examine
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import Request, call
from manyhands.config.job import Job
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import CONTACT_S, RETRY_LEAST_S, RETRY_MOST_S, SILENT_S
from manyhands.run.doctor import facts_wanted, known_of
from manyhands.run.recovery import (
    RunMachines,
    failed_rank,
    from_outside,
    pause_after_failure,
    what_failed,
    worth_a_start,
)

# The pause between two contacts is this part of the time that a machine has been lost.
PAUSE = 0.02
# The agent of a machine that was cut off may still have its processes.
BUSY = "is still ending its earlier processes"
REPLACED = "another launcher has taken over the run"


class RefusedError(ManyhandsError):
    """This machine can't take part, and trying again would not change that."""


class LaunchedMachines(RunMachines):
    """The machines of a launched run. Nothing here waits.

    Args:
        job: what they do.
        machines: all of them, with their states.
        folder: the run folder here.
        say: tells the user, a sentence and its level.

    Attributes:
        code: files that a machine that joins is given.
        term: of this launcher; 0 if the run isn't detached.
        replaced_on: a machine that obeys another launcher.
    """

    def __init__(self, job: Job, machines: Machines, folder: RunFolder, say: Callable[[str, str], object]) -> None:
        self.machines, self.code = machines, dict[str, str]()
        self.term, self.replaced_on = term_in(folder.ranks).head if job.cluster.detach else 0, ""
        self._job, self._folder, self._say = job, folder, say
        self._measured = 0  # bytes of metrics before this start

    # Who takes part.

    @property
    def connected(self) -> list[RunMachine]:
        """The machines that take part and are not lost."""
        return [machine for machine in self.machines.running if not machine.agent.closed]

    @property
    def room(self) -> int:
        """The number of machines that may still join."""
        return self._job.cluster.machines_wanted.stop - 1 - len(self.connected)

    def too_few(self) -> str:
        """Returns why the run can't continue on the machines that are left, or nothing."""
        left, least = len(self.connected), self._job.cluster.machines_wanted.start
        if self.replaced_on:
            return f"{REPLACED} on {self.replaced_on}"
        if left + len(self.all_ready) >= least:
            return ""
        return f"{left} machines are left, but --elastic {self._job.cluster.elastic} needs {least}"

    @property
    def trial(self) -> list[RunMachine]:
        """The machines that joined with this start, whether or not it has made an update."""
        return [machine for machine in self.machines.running if machine.on_trial]

    def on_trial(self) -> list[str]:
        """Returns the machines that joined with this start, until it has made an update."""
        return [] if self.trained else [machine.name for machine in self.trial]

    @property
    def ready(self) -> list[RunMachine]:
        """The machines that can join now."""
        now = time.monotonic()
        return [machine for machine in self.machines.all if machine.state is State.READY and now >= machine.until]

    @property
    def all_ready(self) -> list[RunMachine]:
        """The machines that can join now; none while another one soon can, so that one restart serves both."""
        soon = any(machine.state is State.CONTACTING and machine.facts for machine in self.machines.all)
        return [] if soon else self.ready

    def can_join(self) -> list[str]:
        """Returns the machines that the next start takes in."""
        return [machine.name for machine in self.all_ready][: max(0, self.room)]

    @property
    def trained(self) -> bool:
        """Whether this start has made an update."""
        return _size(self._folder.metrics) > self._measured

    def begin(self, number: int) -> None:
        """Notes that those that take part begin a start with the machines' present order and folders."""
        step = saved_step(self._folder) or 0
        self._measured = _size(self._folder.metrics)
        for rank_group, machine in enumerate(self.machines.running):
            machine.folder, machine.rank_group, machine.generation = machine.run.folder, rank_group, number
            machine.since_step = step if machine.since_step is None else machine.since_step
            if machine.on_trial:
                machine.notify(f"{machine.name} has joined {self._folder.path}", True)
                machine.notify = lambda _text, _takes_part: None

    @property
    def added(self) -> list[Machine]:
        """The machines that were added by the user and have taken part, or do now."""
        takes_part = [one for one in self.machines.all if one.state is State.RUNNING or one.generation >= 0]
        return [machine.machine for machine in takes_part if machine.added]

    # What happens to them.

    def add(self, machine: Machine, notify: Callable[[str, bool], object]) -> None:
        """Adds a machine that the user requests; it joins as soon as it can.

        Raises:
            UserError: it is part of the run already, or no more machines are allowed.
        """
        wanted = f"--elastic {self._job.cluster.elastic}"
        if machine.name in {one.name for one in self.machines.running}:
            raise UserError(f"{machine.name} is already part of the run")
        if machine.name in {one.name for one in self.machines.waiting}:
            raise UserError(f"{machine.name} was lost, and rejoins the run as soon as it answers")
        if self._job.run.script or not self._job.cluster.recovers:
            what = "a script of your own" if self._job.run.script else f"a run with {wanted}"
            raise UserError(f"{what} can't add machines")
        if self.room < 1:
            raise UserError(f"the run has {len(self.connected)} machines, and {wanted} allows no more")
        self.machines.all.append(RunMachine(machine, State.LOST, added=True, notify=notify))

    def note_ending(self, ending: Ending) -> None:
        """Excludes machines that fail again soon, and refuses those with which the start failed."""
        if self.on_trial() and not ending.regrouped and not from_outside(first_cause(ending)):
            for machine in self.trial:
                self.refuse(machine, RefusedError(f"the start with this machine failed: {what_failed(ending)}"))
            return
        step, rank = saved_step(self._folder) or 0, failed_rank(ending)
        failed = [machine for machine in self.machines.running if machine.name in ending.lost]
        for machine in failed or ([] if rank is None else [self._machine_of(rank)]):
            pause_s = pause_after_failure(machine, step)
            if machine.agent.closed:
                machine.lose(pause_s)
            elif pause_s and len(self.connected) > self._job.cluster.machines_wanted.start:
                self._say(f"{machine.name} failed again soon: excluding this machine for {pause_s:.0f} s", "INFO")
                machine.exclude(pause_s)

    def _machine_of(self, rank: int) -> RunMachine:
        for machine in self.machines.running:
            rank -= machine.processes
            if rank < 0:
                return machine
        raise ValueError(f"no machine has rank {rank}")

    def take_in(self) -> list[RunMachine]:
        """Marks as lost who is; the ready machines take part from now on, behind the others, and are returned."""
        for machine in self.machines.running:
            if machine.agent.closed:
                machine.lose()
        joining = self.ready[: max(0, self.room)]
        for machine in joining:
            self.machines.all.remove(machine)
            self.machines.all.append(machine)
            machine.state, machine.on_trial = State.RUNNING, True
        return joining

    def refuse(self, machine: RunMachine, error: ManyhandsError) -> None:
        """Leaves a machine out for good, and tells the user why."""
        machine.disconnect()
        self.machines.all.remove(machine)
        hints = f" ({'; or '.join(error.hints)})" if error.hints else ""
        text = f"{machine.name} can't join: {error.message}{hints}"
        self._say(text, "WARNING")
        machine.notify(text, False)

    def regroups(self) -> bool:
        """Whether the run is to be restarted now, with a machine that can join, or because another launcher has it."""
        joins = not self._job.run.script and self.can_join() and self.trained and worth_a_start(self._folder)
        return bool(joins or self.replaced_on)

    def close(self) -> None:
        """Lets go of the machines that don't take part."""
        for machine in self.machines.waiting:
            machine.disconnect()
            machine.notify(f"the run ended before {machine.name} joined", False)

    # Contacts.

    def tick(self) -> None:
        """Continues the contact with each machine that doesn't take part, as far as that needs no waiting."""
        for machine in self.machines.waiting:
            try:
                self._continue(machine)
            except (LinkClosed, OSError):  # no answer in time, or no memory or files here to ask with
                self._give_up(machine)
            except (RefusedError, RunError, UserError) as error:
                self.refuse(machine, error)

    def _continue(self, machine: RunMachine) -> None:
        now = time.monotonic()
        if machine.state is State.LOST:
            if now < machine.until:
                return
            machine.link = open_agent(machine.machine, self._job.cluster, self._folder.ranks)
            machine.state, machine.until = State.CONTACTING, now + CONTACT_S
            machine.contact = self._contact(machine, machine.link)
            machine.asked = _post(machine.link, next(machine.contact))
        machine.agent.heartbeat()
        machine.agent.flush()
        if machine.state is State.READY:
            _require_alive(machine)
        elif machine.asked and (answers := answer_to(machine.agent, *machine.asked)):
            self._take_answer(machine, *answers)
        elif now > machine.until:
            raise TimeoutError(f"{machine.name} did not answer within {CONTACT_S:.0f} s")

    def _take_answer(self, machine: RunMachine, answer: Any) -> None:
        if isinstance(answer, RunError):
            raise answer
        assert machine.contact
        try:
            machine.asked = _post(machine.agent, machine.contact.send(answer))
        except StopIteration:
            machine.state, machine.until, machine.contact, machine.asked = State.READY, 0.0, None, None

    def _contact(self, machine: RunMachine, link: AgentConnection) -> Generator[Request[Any], Any, None]:
        """Asks a machine everything that needs no other machine."""
        asked, run = time.time(), run_id(self._folder)
        facts = yield call(Agent.hello, facts_wanted(self._job), not link.here)
        link.clock_offset_s = clock_offset(facts.get("time", 0.0), asked)
        self._judge(machine, facts)
        machine.facts = facts
        folder = folder_on(machine, self._folder)
        seen = yield call(Agent.inspect_run, folder, machine.rank_group, machine.generation, run, self.term)
        if self.term and seen.run == run and seen.term > self.term:
            self.replaced_on = machine.name
            raise TimeoutError(f"{machine.name} belongs to another launcher")
        if seen.busy:
            raise TimeoutError(f"{machine.name} {BUSY}")
        if seen.checkpoints and seen.run != run:
            raise RefusedError(f"{folder} on that machine holds another run", hints=("move that folder away",))
        if self.code and not link.here:
            yield call(Agent.take_code, self.code)
        slots = machine.machine.slots
        found = yield call(Agent.prepare, slots, self._job.cluster.threads, self._job.cluster.device)
        if slots > found.count and found.device not in {"cpu", "mps"}:
            raise RefusedError(
                f"{slots} processes are requested, but the machine has {found.count} {found.device} devices"
            )
        machine.device, machine.processes = found.device, slots or found.count

    def _judge(self, machine: RunMachine, facts: Facts) -> None:
        """Raises RefusedError if, by its facts and those of the machines of the run, training would fail with it."""
        everyone = [*self.connected, machine]
        known = {one.name: one.facts for one in self.connected} | {machine.name: facts}
        found = examine(known_of(self._job, [one.machine for one in everyone], known))
        if failures := [finding for finding in found if finding.severity == "fail"]:
            raise RefusedError(failures[0].what, machine.name, failures[0].hints)

    def _give_up(self, machine: RunMachine) -> None:
        """Contacts a machine again after a pause that grows; one that was just requested and never there is refused."""
        if machine.requested and machine.link and not machine.facts:
            problem = explain_contact(
                machine.machine, machine.link.close(), machine.link.log_tail(), self._job.cluster
            )  # fmt: skip
            self.refuse(machine, RefusedError(problem.what, hints=problem.hints))
            return
        now, excluded_until = time.monotonic(), machine.until if machine.state is State.READY else 0.0
        machine.disconnect()
        machine.state = State.LOST
        machine.until = max(excluded_until, now + min(max(RETRY_LEAST_S, PAUSE * (now - machine.since)), RETRY_MOST_S))


def folder_on(machine: RunMachine, folder: RunFolder) -> str:
    """Returns the path of the run folder on a machine: as opened there, or as seen from the work folder."""
    path = folder.path.absolute()
    return machine.folder or str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _post(link: AgentConnection, request: Request[Any]) -> tuple[int, Request[Any]]:
    return link.post(request), request


def _require_alive(machine: RunMachine) -> None:
    """Raises TimeoutError if a machine that was ready is lost again."""
    link = machine.agent
    link.read()
    if link.closed or (not link.here and time.monotonic() - link.last_received > SILENT_S):
        raise TimeoutError(f"{machine.name} was lost again")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
