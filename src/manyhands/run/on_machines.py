"""Starts a run's processes on its machines; after a fault on those that are left, and on those that come back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from manyhands.checkpoint.saved import saved_step
from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.assemble import AgentLinks
from manyhands.cluster.agents.claim import Term, raise_term, term_in
from manyhands.cluster.agents.code import with_absolute_paths
from manyhands.cluster.agents.connection import AgentConnection, LinkClosed
from manyhands.cluster.agents.ending import Ending, first_cause
from manyhands.cluster.agents.mirror import Receiver
from manyhands.cluster.agents.open_tunnels import NoTunnelError, TunnelRoutes, join_through_ssh
from manyhands.cluster.agents.orders import Orders, orders_for
from manyhands.cluster.agents.store_tunnel import StorePlaces, StoreTunnel
from manyhands.cluster.agents.tunnel import Tunnels
from manyhands.cluster.hosts.inventory import LOOPBACK, Address, Machine, Rendezvous
from manyhands.cluster.hosts.machines import with_machines
from manyhands.cluster.messages import call
from manyhands.config.job import Job
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import STORE_S
from manyhands.parallel.ports import loopback_interface
from manyhands.parallel.tunnel_ends import VARIABLE
from manyhands.run.copies import RecordsCopy, copy_of_records
from manyhands.run.folders_of_run import REPLACED, FoldersOfRun
from manyhands.run.pending import PendingMachine, PendingMachines, RefusedError, RejoinInfo
from manyhands.run.recovery import (
    LostWorkError,
    Recovery,
    RunMachines,
    Setbacks,
    failed_rank,
    from_outside,
    gone_on_with,
    worth_a_start,
)
from manyhands.run.who_where import describe, write_places


class AgentMachines(RunMachines):
    """The machines of a run, and what each is and does in it.

    Args:
        job: the run's.
        agents: their agents, in the order of ranks; changed when machines are lost, or come.
        sizes: processes on each.
        devices: kind of device on each.
        addresses: where each is reached by the others; empty where only ssh reaches them.
        folder: the run folder here.
        receiver: keeps the records that come.
        say: tells the user a sentence.
        check_machines: where each machine is reached by the others, tried anew; raises RunError where some are not.
        pending: who is to take part and does not yet.

    Attributes:
        folders: the run folder on each machine.
        hear: lets those speak who ask for another machine.
        copy: has a second machine keep the records, where there is one that is to.
    """

    def __init__(  # noqa: PLR0913 - what a run is on
        self,
        job: Job,
        agents: AgentLinks,
        sizes: Sequence[int],
        devices: Sequence[str],
        addresses: Sequence[Address],
        folder: RunFolder,
        receiver: Receiver,
        say: Callable[[str], object],
        check_machines: Callable[[AgentLinks], list[Address]],
        pending: PendingMachines,
    ) -> None:
        self.agents, self._folder, self._say = agents, folder, say
        self._cluster, self._script = job.cluster, bool(job.run.script)
        self._check_machines, self.pending, self._setbacks = check_machines, pending, Setbacks()
        names = [link.machine.name for link in agents.links]
        self._sizes = dict(zip(names, sizes, strict=True))
        self._devices = dict(zip(names, devices, strict=True))
        self._addresses = dict(zip(names, addresses, strict=True)) if addresses else {}
        self._through_ssh: TunnelRoutes | None = None
        self.head_tunnels = Tunnels()
        pending.term = term_in(folder.ranks).head if job.cluster.detach else 0
        self.folders = FoldersOfRun(agents, folder, receiver, pending)
        self.hear: Callable[[], object] = lambda: None
        self._trial: list[PendingMachine] = []
        self._joined: list[Machine] = []  # by the user's wish, since the job began
        self.copy: RecordsCopy | None = None
        self._measured = 0  # bytes of metrics that were there before this start

    @property
    def sizes(self) -> list[int]:
        """Processes on each machine."""
        return [self._sizes[link.machine.name] for link in self.agents.links]

    @property
    def addresses(self) -> list[Address]:
        """Of each machine."""
        names = [link.machine.name for link in self.agents.links]
        if self._through_ssh:
            return [Address(loopback_interface(), self._through_ssh.ends[name].address) for name in names]
        return [self._addresses.get(name, Address("", LOOPBACK)) for name in names]

    def too_few(self) -> str:
        """Why the run can't go on with the machines that are left; nothing where it can."""
        left, least = self._left, self._cluster.machines_wanted.start
        if self.pending.replaced_on:
            return f"{REPLACED} on {self.pending.replaced_on}"
        if left + len(self.pending.can_come) >= least:
            return ""
        return f"{left} machines are left, but --elastic {self._cluster.elastic} needs {least}"

    @property
    def _left(self) -> int:
        return sum(not link.closed for link in self.agents.links)

    @property
    def room(self) -> int:
        """For so many more machines."""
        return self._cluster.machines_wanted.stop - 1 - self._left

    def on_trial(self) -> list[str]:
        """The machines that have just come, with which nothing was trained yet."""
        return [] if self.steps else [one.name for one in self._trial]

    def coming(self) -> list[str]:
        """The machines that can be taken up now."""
        return [one.name for one in self.pending.can_come][: max(0, self.room)]

    def regroups(self) -> bool:
        """True where the run is to start anew with who has come, no script of the user's; carries records, too."""
        self.hear()
        self.pending.tick()
        if self.copy:
            self.copy.carry()
        more = not self._script and bool(self.coming()) and self.steps and worth_a_start(self._folder)
        return more or bool(self.pending.replaced_on)

    @property
    def steps(self) -> bool:
        """Whether this start has made an update that was told."""
        return _size(self._folder.metrics) > self._measured

    def add_pending(self, machine: Machine, notify: Callable[[str, bool], object]) -> None:
        """Has a machine that the user names take part as soon as it can.

        Raises:
            UserError: it does, or is waited for already, or no more are wanted.
        """
        wanted = f"--elastic {self._cluster.elastic}"
        if machine.name in {link.machine.name for link in self.agents.links}:
            raise UserError(f"{machine.name} is already part of the run")
        if machine.name in self.pending.names():
            raise UserError(f"{machine.name} was lost, and rejoins the run as soon as it answers")
        if self._script or not self._cluster.recovers:
            what = "a script of your own" if self._script else f"a run with {wanted}"
            raise UserError(f"{what} can't add machines")
        if self.room < 1:
            raise UserError(f"the run has {self._left} machines, and {wanted} allows no more")
        self.pending.add(PendingMachine(machine, self.folders.part_of(machine.name), notify, asked_for=True))

    def handle_ending(self, ending: Ending) -> None:
        """Sets aside a machine that fails again and again, and leaves out those with which there is no start."""
        cause = first_cause(ending)
        if self.on_trial() and not ending.regrouped and not from_outside(cause):
            what = cause.what if cause else ending.refused.message if ending.refused else ending.broken
            for one in list(self._trial):
                self._refuse(one, RefusedError(f"the start with this machine failed: {what}"))
            return
        step, rank = saved_step(self._folder) or 0, failed_rank(ending)
        for name in [*ending.lost] or ([] if rank is None else [self._machine_of(rank)]):
            pause_s = self._setbacks.fails(name, step)
            link = next((link for link in self.agents.links if link.machine.name == name), None)
            if link and not link.closed and pause_s and self._left > self._cluster.machines_wanted.start:
                self._say(f"{name} failed again soon: excluding this machine for {pause_s:.0f} s")
                self._wait_for(link, pause_s)
            elif link and link.closed:
                self._wait_for(link, pause_s)

    def _machine_of(self, rank: int) -> str:
        """The name of the machine that has a rank."""
        ends = [(sum(self.sizes[: number + 1]), link) for number, link in enumerate(self.agents.links)]
        return next((link.machine.name for end, link in ends if rank < end), "")

    def _wait_for(self, link: AgentConnection, pause_s: float) -> None:
        """A machine that takes no part now is to do so again: after a pause, or once it is back."""
        name, now = link.machine.name, time.monotonic()
        waiting = next((one for one in self._trial if one.link is link), None)
        waiting = waiting or PendingMachine(link.machine, self.folders.part_of(name))
        waiting.since, waiting.not_before = now, now + pause_s
        if link.closed:
            waiting.close()
        else:
            waiting.link, waiting.ready = link, (self._devices[name], self._sizes[name])
            waiting.facts = self.agents.facts[self.agents.links.index(link)]
        self._trial = [one for one in self._trial if one is not waiting]
        self.pending.add(waiting)
        self._leave_out(name)

    def _refuse(self, one: PendingMachine, error: ManyhandsError) -> None:
        self._trial = [other for other in self._trial if other is not one]
        self._joined = [machine for machine in self._joined if machine is not one.machine]
        self._leave_out(one.name)
        self.pending.refuse(one, error)

    def _leave_out(self, name: str) -> None:
        self.folders.estranged.add(name)
        self.agents.keep(lambda link: link.machine.name != name)

    def orders(self, recovery: Recovery, way: StoreTunnel) -> list[Orders]:
        """What each machine that is left is to start next, and how it comes to the store, whose port is opened now."""
        job, number = recovery.job, recovery.number
        self._trial = []
        while (places := self._gathered(way, again=number > 0)) is None:
            pass
        self._joined += [one.machine for one in self._trial if one.asked_for]
        job = job.model_copy(update={"cluster": with_machines(job.cluster, self._joined)})
        if self.folders.saved != self.folders.before:  # what the head has not heard of, too
            job = gone_on_with(job)
        self._note_start(number)
        if self.pending.term:
            raise_term(self._folder.ranks, Term(self.pending.term, number))
        for line in describe(self.agents, self.sizes, self.addresses, places, self._through_ssh):
            self._say(line)
        if job.cluster.sync_code:
            job = with_absolute_paths(job)
        return [
            replace(
                orders_for(
                    job,
                    "train",
                    answer.folder,
                    Rendezvous(tuple(self.sizes), machine, *end, link.machine.devices),
                    device=self._devices[link.machine.name],
                    environment={**address.environment(), **self._tunnels_of(link)},
                    generation=number,
                ),
                term=self.pending.term,
            )
            for machine, (link, answer, address, end) in enumerate(
                zip(self.agents.links, self.folders.opened, self.addresses, places.ends, strict=True)
            )
        ]

    def _gathered(self, way: StoreTunnel, *, again: bool) -> StorePlaces | None:
        """Has those that take part ready for a start; None where one more was lost meanwhile, which is left out."""
        try:
            if again:
                self._take_up()
                self._regroup()
            self._join_through_ssh()
            return self._store(way)
        except (LinkClosed, NoTunnelError) as error:
            if not again:
                raise
            # One that can't be reached any more is as good as lost.
            lost = error.alone if isinstance(error, NoTunnelError) else error.where
            link = next(link for link in self.agents.links if link.machine.name == lost)
            link.close(0.0)
            if too_few := self.too_few():
                self._say(f"{error.message}: {too_few}")
                raise
            self._say(f"{error.message}: continuing without {lost}")
            new = next((one for one in self._trial if one.link is link), None)
            if new and isinstance(error, NoTunnelError):
                self._refuse(new, error)
            return None

    def _join_through_ssh(self) -> None:
        """Makes tunnels for the next start, where only ssh reaches the machines and there are several."""
        through_ssh = not self._addresses and len(self.agents.links) > 1
        self._through_ssh = join_through_ssh(self.agents, self._cluster, self.head_tunnels) if through_ssh else None

    def _store(self, way: StoreTunnel) -> StorePlaces:
        """Where the store is; it goes through the tunnels too, where there are any."""
        if not self._through_ssh:
            return way.open(self.agents, self.addresses)
        address = self.addresses[0].address
        port = self.agents.links[0].ask(call(Agent.bind, address), STORE_S, self.agents.links)
        return StorePlaces(((address, port),) * len(self.agents.links))

    def _tunnels_of(self, link: AgentConnection) -> dict[str, str]:
        return self._through_ssh.ends[link.machine.name].environment() if self._through_ssh else {VARIABLE: ""}

    def _take_up(self) -> None:
        """Leaves out who is lost, and takes in who has come, where all reach each other."""
        for link in [link for link in self.agents.links if link.closed]:
            self._wait_for(link, 0.0)
        came = [one for one in self.pending.take(self.room) if self._opens(one)]
        for one in came:
            assert one.link
            assert one.ready
            self.agents.links.append(one.link)
            self.agents.facts.append(one.facts)
            self.agents.clock_offsets_s[one.name] = one.clock_offset_s
            self._devices[one.name], self._sizes[one.name] = one.ready
        if came:
            self._reach_all(came)
        self._trial += [one for one in came if one.link in self.agents.links]

    def _opens(self, one: PendingMachine) -> bool:
        """Opens the run folder on a machine that has come; why that can't be is said."""
        assert one.link
        try:
            answer = self.folders.open_on(one.link)
            if answer.taken:
                raise RefusedError(f"a run is active in {answer.folder} on that machine")
        except LinkClosed:
            one.close()
            self.pending.add(one)
        except (RefusedError, RunError) as error:
            self.pending.refuse(one, error)
        else:
            return True
        return False

    def _reach_all(self, came: Sequence[PendingMachine]) -> None:
        began_alone = len(self.agents.links) == 1 + len(came)
        try:
            addresses = self._check_machines(self.agents)
            if self._addresses and not addresses and not began_alone:
                raise RunError("only ssh reaches this machine, but the other machines connect directly")
        except RunError as error:
            lost = [link for link in self.agents.links if link.closed and link not in [one.link for one in came]]
            for one in came:
                if lost:  # another one's fault
                    self._leave_out(one.name)
                    self.pending.add(one)
                else:
                    self._refuse(one, error)
        else:
            names = [link.machine.name for link in self.agents.links]
            self._addresses = dict(zip(names, addresses, strict=True)) if addresses else {}

    def _regroup(self) -> None:
        """The first machine is one that has the newest checkpoint, and all records."""
        self.folders.open(output=self._script, records=False)
        newest, last_step = self.folders.saved, saved_step(self._folder)
        if newest < 0 and last_step is not None and not self._script:
            raise LostWorkError(f"no remaining machine has a checkpoint; the newest checkpoint is of step {last_step}")
        self.folders.give_records(*self.folders.newest_first())
        self.folders.open(output=self._script)

    def resume_from_newest(self, absent: Sequence[Machine]) -> None:
        """At the start of a run that goes on: any machine may have its newest checkpoint, and then all records.

        Args:
            absent: who doesn't answer now, and takes part once it does.
        """
        self.folders.estranged |= {machine.name for machine in absent}
        for machine in absent:
            self.pending.add(PendingMachine(machine, self.folders.part_of(machine.name)))
        before, last_step = self.agents.links[0], saved_step(self._folder)
        first, there = self.folders.newest_first()
        if first is before:
            return
        self._say(
            f"{first.machine.name} has the newest checkpoint, of step {there.saved}, and becomes the first machine"
        )
        behind = last_step is None or last_step < there.saved
        if not behind:
            self.folders.give_records(first, there)
        self.folders.open(output=False, anew=behind)

    def _note_start(self, number: int) -> None:
        """Who takes part in a start; in machines.json who has which ranks, and where its part of the run folder is."""
        names = [link.machine.name for link in self.agents.links]
        self.folders.parts.update(
            (name, RejoinInfo(answer.folder, machine, number))
            for machine, (name, answer) in enumerate(zip(names, self.folders.opened, strict=True))
        )
        self._setbacks.begin(names, saved_step(self._folder) or 0)
        self._measured = _size(self._folder.metrics)
        self.copy = copy_of_records(self._folder, self.agents.links, self.folders.opened, self.folders.estranged)
        for one in self._trial:
            one.asked_for = False
            one.notify(f"{one.name} has joined {self._folder.path}", True)
        write_places(self._folder, self.agents, self.sizes, self.addresses, self.folders.opened)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
