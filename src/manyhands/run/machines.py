"""The membership of a launched run: running, lost, contacted, ready and excluded machines.

A RUNNING machine takes part in the current start (see recovery.py). `until` is the time limit of CONTACTING, and the
earliest time to contact a LOST machine or to use a READY one.

    from         to          reason                                                            method
    RUNNING      LOST        its connection ended or was silent, and could not be replaced     RunMachine.lose
    RUNNING      READY       it failed repeatedly and isn't needed: excluded for a while       record_ending
    RUNNING      READY       another machine was lost while it joined                          start.py, _add_joining
    RUNNING      refused     it had just joined, and the start failed before its first update  record_ending
    LOST         CONTACTING  the pause before the next contact is over                         _open
    CONTACTING   READY       the agent has answered every request                              _receive
    CONTACTING   LOST        no answer, workers still exiting, or it obeys another launcher    _give_up
    READY        RUNNING     a start includes it; the run restarts if enough updates remain    add_ready_machines
    READY        LOST        its connection ended or was silent                                _give_up
    not RUNNING  refused     it can't take part, and another attempt would not change that     tick
"""

import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from manyhands.checkpoint.folders import saved_step
from manyhands.cluster.agents import agent, connection, folders, ssh
from manyhands.cluster.agents.machines import Machines, MachineState, RunMachine, clock_offset, open_agent
from manyhands.cluster.doctor.findings import Facts, examine
from manyhands.cluster.failures import Ending, first_cause
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import Request, call
from manyhands.config.job import Job
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.files import file_size
from manyhands.core.records import MACHINE_LOST
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import CONTACT_S, RETRY_LEAST_S, RETRY_MOST_S, SILENT_S
from manyhands.run.doctor import facts_wanted, untested_survey
from manyhands.run.recovery import RestartHooks, Say, describe_failure, is_external_fault, worth_restarting

BUSY = "is still ending its earlier processes"  # a disconnected machine may still run its workers
REPLACED = "another launcher has taken over the run"


class RefusedError(ManyhandsError):
    """Raised if a machine can't join a run and a retry would fail too."""


class Membership(RestartHooks):
    """Tracks the states of a launched run's machines. No method blocks."""

    def __init__(self, job: Job, machines: Machines, folder: RunFolder, say: Say) -> None:
        self.machines, self._job, self._folder, self._say = machines, job, folder, say
        self.code = dict[str, str]()  # code for machines that join, base64 by path
        self.term = folders.read_term(folder.ranks).head if job.cluster.detach else 0  # of this launcher
        self.replaced_on = ""  # name of a machine that obeys another launcher
        self._measured = 0  # bytes of metrics before the current start
        self._refused = dict[str, RunMachine]()

    @property
    def connected(self) -> list[RunMachine]:
        return [machine for machine in self.machines.running if not machine.agent.closed]

    @property
    def free_places(self) -> int:
        return max(0, self._job.cluster.machines_wanted.stop - 1 - len(self.connected))

    @property
    def joined(self) -> list[RunMachine]:
        return [machine for machine in self.machines.running if machine.joined]

    @property
    def ready(self) -> list[RunMachine]:
        found = [machine for machine in self.machines.all if machine.state is MachineState.READY]
        return [machine for machine in found if time.monotonic() >= machine.until]

    @property
    def trained(self) -> bool:
        return file_size(self._folder.metrics) > self._measured

    @property
    def added_machines(self) -> list[Machine]:
        return [machine.spec for machine in self.machines.all if machine.added]

    def shortage_reason(self) -> str:
        left, least = len(self.connected), self._job.cluster.machines_wanted.start
        if self.replaced_on:
            return f"{REPLACED} on {self.replaced_on}"
        if left + len(self.ready) >= least:
            return ""
        return f"--elastic {self._job.cluster.elastic} requires at least {least} machines, but the run has only {left}"

    def newly_joined(self) -> list[str]:
        return [] if self.trained else [machine.name for machine in self.joined]

    def joining_next(self) -> list[str]:
        # No machine while another contact progresses, so that one restart serves both.
        soon = any(machine.state is MachineState.CONTACTING and machine.facts for machine in self.machines.all)
        return [] if soon else [machine.name for machine in self.ready][: self.free_places]

    def regroups(self) -> bool:
        """Returns True if the run must restart now, because a machine can join or another launcher has taken over."""
        joins = not self._job.run.script and self.joining_next() and self.trained and worth_restarting(self._folder)
        return bool(joins or self.replaced_on)

    def record_start(self, number: int) -> None:
        """Stores each running machine's position and start number; notifies the clients of joined machines."""
        step = saved_step(self._folder) or 0
        self._measured = file_size(self._folder.metrics)
        for position, machine in enumerate(self.machines.running):
            machine.position, machine.generation = position, number
            machine.since_step = step if machine.since_step is None else machine.since_step
            machine.requested = False
            if machine.joined:
                machine.notify(f"{machine.name} has joined {self._folder.path}", True)
                machine.notify = lambda _text, _takes_part: None

    def add(self, spec: Machine, notify: Callable[[str, bool], object]) -> None:
        """Adds a machine for `manyhands join`; `notify` gets the result. Raises UserError if the request is refused."""
        name, wanted = spec.name, f"--elastic {self._job.cluster.elastic}"
        if name in {machine.name for machine in self.machines.running}:
            raise UserError(f"{name} is already part of the run")
        if name in {machine.name for machine in self.machines.waiting}:
            raise UserError(f"{name} was lost, and rejoins the run as soon as it answers")
        if self._job.run.script or not self._job.cluster.recovers:
            what = "a script of your own" if self._job.run.script else f"a run with {wanted}"
            raise UserError(f"machines can't be added to {what}")
        if not self.free_places:
            raise UserError(f"the run already has {len(self.connected)} machines, the maximum of {wanted}")
        machine = self._refused.pop(name, None) or RunMachine(spec)
        if machine.generation < 0:  # the machine's working directory may have changed
            machine.opened_folder = None
        machine.spec, machine.state, machine.until, machine.since = spec, MachineState.LOST, 0.0, time.monotonic()
        machine.requested, machine.notify = True, notify
        self.machines.all.append(machine)

    def record_ending(self, ending: Ending) -> None:
        """Refuses machines whose first start failed; otherwise counts a failure of each lost or failed machine.

        After repeated failures, a lost machine isn't contacted for a while; a failed one is excluded if not needed.
        """
        cause = first_cause(ending)
        if self.newly_joined() and not ending.regrouped and not is_external_fault(cause):
            for machine in self.joined:
                self.refuse(machine, RefusedError(f"starting with {machine.name} failed: {describe_failure(ending)}"))
            return
        step, by_cause = saved_step(self._folder) or 0, list[RunMachine]()
        if cause and cause.error != MACHINE_LOST:  # neither a lost machine nor an ended tunnel between machines
            by_rank = [machine for machine in self.machines.running for _ in range(machine.processes)]
            by_cause = by_rank[cause.rank : cause.rank + 1]
        lost = [machine for machine in self.machines.running if machine.name in ending.lost]
        for machine in lost or by_cause:
            pause_s = machine.count_failure(step)
            if machine.agent.closed:
                machine.lose(pause_s)
            elif pause_s and len(self.connected) > self._job.cluster.machines_wanted.start:
                self._say(f"{machine.name} failed {machine.failures} times: excluded for {pause_s:.0f} s", "INFO")
                machine.exclude(pause_s)

    def add_ready_machines(self) -> list[RunMachine]:
        """Marks disconnected machines as lost. Adds and returns ready machines, up to the maximum of --elastic."""
        for machine in self.machines.running:
            if machine.agent.closed:
                machine.lose()
        joining = self.ready[: self.free_places]
        self.machines.all = [machine for machine in self.machines.all if machine not in joining] + joining
        for machine in joining:
            machine.state, machine.joined = MachineState.RUNNING, True
            machine.added |= machine.requested
        return joining

    def refuse(self, machine: RunMachine, error: ManyhandsError) -> None:
        self.machines.all.remove(machine)
        machine.lose()
        machine.added = machine.requested = False
        self._refused[machine.name] = machine
        ways = (hint.removeprefix("or ") for hint in error.hints)
        hints = f" ({'; or '.join(ways)})" if error.hints else ""
        text = f"{machine.name} can't join: {error.message}{hints}"
        self._say(text, "WARNING")
        machine.notify(text, False)

    def close(self) -> None:
        for machine in self.machines.waiting:
            machine.disconnect()
            machine.notify(f"the run ended before {machine.name} joined", False)

    def tick(self) -> None:
        """Advances the exchange of messages with each machine that isn't running, without blocking."""
        steps = {MachineState.LOST: self._open, MachineState.CONTACTING: self._receive, MachineState.READY: self._check}
        for machine in self.machines.waiting:
            try:
                if machine.state is not MachineState.LOST:
                    machine.agent.heartbeat()
                    machine.agent.flush()
                steps[machine.state](machine)
            except (connection.LinkClosed, OSError):  # TimeoutError, or no memory or files here: try again later
                self._give_up(machine)
            except (RefusedError, RunError, UserError) as error:
                self.refuse(machine, error)

    def _open(self, machine: RunMachine) -> None:
        now = time.monotonic()
        if now < machine.until:
            return
        machine.link = open_agent(machine.spec, self._job.cluster, self._folder.ranks)
        machine.state, machine.until = MachineState.CONTACTING, now + CONTACT_S
        machine.contact = self._requests(machine, machine.link)
        request = next(machine.contact)
        machine.asked = machine.link.post(request), request

    def _receive(self, machine: RunMachine) -> None:
        """Handles the next answer of a contacted machine, and sends the next request."""
        assert machine.asked
        assert machine.contact
        answers = connection.poll_answer(machine.agent, *machine.asked)
        if not answers:
            if time.monotonic() > machine.until:
                raise TimeoutError(f"{machine.name} did not answer within {CONTACT_S:.0f} s")
            return
        if isinstance(answers[0], RunError):
            raise answers[0]
        try:
            request = machine.contact.send(answers[0])
            machine.asked = machine.agent.post(request), request
        except StopIteration:
            machine.contact = machine.asked = None
            machine.state, machine.until = MachineState.READY, 0.0

    def _check(self, machine: RunMachine) -> None:
        link = machine.agent
        link.read()
        if link.closed or (not link.here and time.monotonic() - link.last_received > SILENT_S):
            raise TimeoutError(f"{machine.name} was lost again")

    def _requests(self, machine: RunMachine, link: connection.AgentConnection) -> Generator[Request[Any], Any, None]:
        """Yields the requests to a joining machine. Its `send` method takes the answer to the last request."""
        asked, run = time.time(), folders.run_id(self._folder)
        facts = yield call(agent.Agent.hello, facts_wanted(self._job), not link.here)
        link.clock_offset_s = clock_offset(facts.get("time", 0.0), asked)
        self._check_facts(machine, facts)
        machine.facts = facts
        folder = remote_folder_path(machine, self._folder)
        seen = yield call(agent.Agent.inspect_run, folder, machine.position, machine.generation, run, self.term)
        if self.term and seen.run == run and seen.term > self.term:
            self.replaced_on = machine.name
            raise TimeoutError(f"{machine.name} is already used by a newer launcher of this run")
        if seen.taken:
            raise TimeoutError(f"{machine.name} {BUSY}")
        if seen.checkpoints and seen.run != run:
            raise RefusedError(f"its folder {folder} belongs to a different run", hints=("rename the folder",))
        machine.opened_folder = seen  # keeps the absolute path, because `take_code` changes directory
        if self.code and not link.here:
            yield call(agent.Agent.take_code, self.code)
        options, slots = self._job.cluster, machine.spec.slots
        machine.set_device(slots, *(yield call(agent.Agent.prepare_workers, slots, options.threads, options.device)))

    def _check_facts(self, machine: RunMachine, facts: Facts) -> None:
        """Raises RefusedError if a check of the doctor predicts that training with this machine would fail."""
        everyone = [*self.connected, machine]
        known = {one.name: one.facts for one in self.connected} | {machine.name: facts}
        found = examine(untested_survey(self._job, [one.spec for one in everyone], known))
        if failures := [finding for finding in found if finding.severity == "fail"]:
            raise RefusedError(failures[0].what, machine.name, failures[0].hints)

    def _give_up(self, machine: RunMachine) -> None:
        """Schedules the next contact after an increasing pause. Refuses a requested machine that never answered."""
        if machine.requested and machine.link and not machine.facts:
            code, link = machine.link.close(), machine.link
            problem = ssh.explain_contact(machine.spec, code, link.log_tail(), self._job.cluster)
            self.refuse(machine, RefusedError(problem.message, hints=problem.hints))
            return
        excluded_until = machine.until if machine.state is MachineState.READY else 0.0
        machine.disconnect()
        now = time.monotonic()
        pause_s = min(max(RETRY_LEAST_S, 0.02 * (now - machine.since)), RETRY_MOST_S)
        machine.state, machine.until = MachineState.LOST, max(excluded_until, now + pause_s)


def remote_folder_path(machine: RunMachine, folder: RunFolder) -> str:
    """Returns the path of the run folder on a machine, which is the same path as here if it was never opened there."""
    path = folder.path.absolute()
    unopened = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return machine.opened_folder.folder if machine.opened_folder else str(unopened)
