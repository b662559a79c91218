"""Starts a run's processes on its machines; after a fault on those that are left."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from manyhands.cluster.agents.assemble import Crew
from manyhands.cluster.agents.code import with_absolute_paths
from manyhands.cluster.agents.connection import AgentConnection, LinkClosed
from manyhands.cluster.agents.dig import NoWayError, Way, join_through_ssh
from manyhands.cluster.agents.mirror import Receiver, pieces_of
from manyhands.cluster.agents.orders import Orders, orders_for
from manyhands.cluster.agents.own_tunnels import Tunnels
from manyhands.cluster.agents.protocol import Bind, KeepRecords, OpenRun, RunOpened
from manyhands.cluster.agents.store_way import ASK_S, StorePlaces, StoreWay
from manyhands.cluster.descriptions.inventory import Address, Meeting
from manyhands.config.job import Job
from manyhands.core.claim import new_holder, run_id
from manyhands.core.folder import RunFolder
from manyhands.core.records import write_json
from manyhands.core.stops import saved_step
from manyhands.core.tunnel_ends import VARIABLE
from manyhands.parallel.ports import loopback_interface
from manyhands.run.recovery import LostWorkError, Recovery, gone_on_with
from manyhands.run.train import LOOPBACK

# Records that wait for a slow line.
RECORDS_S = 120.0


class OnMachines:
    """The machines of a run, and what each is and does in it.

    Args:
        crew: their agents, in the order of ranks; changed when machines are lost.
        sizes: processes on each.
        devices: kind of device on each.
        addresses: where each is reached by the others; empty where only ssh reaches them.
        folder: the run folder here.
        receiver: keeps the records that come.
        say: tells the user a sentence.
    """

    def __init__(
        self,
        crew: Crew,
        sizes: Sequence[int],
        devices: Sequence[str],
        addresses: Sequence[Address],
        folder: RunFolder,
        receiver: Receiver,
        say: Callable[[str], object],
    ) -> None:
        self.crew, self._folder, self._receiver, self._say = crew, folder, receiver, say
        names = [link.machine.name for link in crew.links]
        self._sizes = dict(zip(names, sizes, strict=True))
        self._devices = dict(zip(names, devices, strict=True))
        self._addresses = dict(zip(names, addresses, strict=True)) if addresses else {}
        self._through_ssh: Way | None = None
        self.head_tunnels = Tunnels()
        self._holder = new_holder()
        self.opened: list[RunOpened] = []
        self._before: int | None = None  # the newest step that was saved before this run's first start

    @property
    def sizes(self) -> list[int]:
        """Processes on each machine."""
        return [self._sizes[link.machine.name] for link in self.crew.links]

    @property
    def addresses(self) -> list[Address]:
        """Of each machine."""
        names = [link.machine.name for link in self.crew.links]
        if self._through_ssh:
            return [Address(loopback_interface(), self._through_ssh.ends[name].address) for name in names]
        return [self._addresses.get(name, Address("", LOOPBACK)) for name in names]

    def open_folders(self, *, output: bool, records: bool = True) -> list[RunOpened]:
        """The run folder on every machine, at the same place in its work folder; a shared one is known by a token."""
        token = f".shared-{secrets.token_hex(8)}"
        marker = self._folder.ranks / token
        marker.touch()
        try:
            path = self._folder.path.absolute()
            place = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
            requests = [
                OpenRun(
                    str(path) if link.here else place, token, self._holder, run_id(self._folder),
                    records=records and number == 0, held=self._receiver.held(), output=output,
                )
                for number, link in enumerate(self.crew.links)
            ]  # fmt: skip
            self.opened = self.crew.ask(requests)
        finally:
            marker.unlink()
        self._before = self._saved if self._before is None else self._before
        return self.opened

    @property
    def _saved(self) -> int:
        """The newest step that is saved on any machine; -1 for none."""
        return max(answer.saved for answer in self.opened)

    def too_few(self, job: Job) -> str:
        """Why the run can't go on with the machines that are left; nothing where it can."""
        left = [link.machine.name for link in self.crew.links if not link.closed]
        least = job.cluster.machines_wanted.start
        if len(left) >= least:
            return ""
        return f"{len(left)} of its machines are left, and --elastic {job.cluster.elastic} wants {least}"

    def orders(self, recovery: Recovery, way: StoreWay) -> list[Orders]:
        """What each machine that is left is to start next, and how it comes to the store, whose port is opened now."""
        job, number = recovery.job, recovery.number
        while not self._gathered(job, again=number > 0):
            pass
        if self._saved != self._before:  # what the head has not heard of, too
            job = gone_on_with(job)
        places = self._store(way)
        self._note_machines()
        for line in describe(self.crew, self.sizes, self.addresses, places, self._through_ssh):
            self._say(line)
        if job.cluster.sync_code:
            job = with_absolute_paths(job)
        return [
            orders_for(
                job,
                "train",
                answer.folder,
                Meeting(tuple(self.sizes), machine, *end, link.machine.devices),
                device=self._devices[link.machine.name],
                environment={**address.environment(), **self._tunnels_of(link)},
                generation=number,
            )
            for machine, (link, answer, address, end) in enumerate(
                zip(self.crew.links, self.opened, self.addresses, places.ends, strict=True)
            )
        ]

    def _gathered(self, job: Job, *, again: bool) -> bool:
        """Has those that are left ready for a start; False where one more was lost meanwhile, which is left out."""
        try:
            if again:
                self._regroup(job)
            self._join_through_ssh(job)
        except (LinkClosed, NoWayError) as error:
            if not again:
                raise
            # One that can't be reached any more is as good as lost.
            lost = error.alone if isinstance(error, NoWayError) else error.where
            self._say(f"{error.what}: the run goes on without {lost}")
            next(link for link in self.crew.links if link.machine.name == lost).close(0.0)
            if self.too_few(job):
                raise
            return False
        return True

    def _join_through_ssh(self, job: Job) -> None:
        """Makes tunnels for the next start, where only ssh reaches the machines and there are several."""
        through_ssh = not self._addresses and len(self.crew.links) > 1
        self._through_ssh = join_through_ssh(self.crew, job.cluster, self.head_tunnels) if through_ssh else None

    def _store(self, way: StoreWay) -> StorePlaces:
        """Where the store is; it goes through the tunnels too, where there are any."""
        if not self._through_ssh:
            return way.open(self.crew, self.addresses)
        address = self.addresses[0].address
        port = self.crew.links[0].ask(Bind(address), ASK_S).port
        return StorePlaces(((address, port),) * len(self.crew.links))

    def _tunnels_of(self, link: AgentConnection) -> dict[str, str]:
        return self._through_ssh.ends[link.machine.name].environment() if self._through_ssh else {VARIABLE: ""}

    def _regroup(self, job: Job) -> None:
        """Leaves out who is lost; the first machine is one that has the newest checkpoint, and all records."""
        output = bool(job.run.script)
        self.crew.keep(lambda link: not link.closed)
        opened, newest = self.open_folders(output=output, records=False), self._saved
        told = saved_step(self._folder)
        if newest < 0 and told is not None and not job.run.script:
            raise LostWorkError(f"no machine that is left has a checkpoint, of which the newest is of step {told}")
        rank = dict(zip((link.machine.name for link in self.crew.links), opened, strict=True))
        self.crew.links.sort(key=lambda link: rank[link.machine.name].saved < newest)  # keeps their order else
        first = self.crew.links[0]
        self._give_records(first, rank[first.machine.name])
        self.open_folders(output=output)

    def _give_records(self, link: AgentConnection, there: RunOpened) -> None:
        """Rank 0 goes on with what is in the head's folder, which knows of the fault and of what came before."""
        if link.here or there.shared:
            return
        for pieces in pieces_of(self._folder.path, there.held):
            link.ask(KeepRecords(there.folder, pieces), RECORDS_S)

    def _note_machines(self) -> None:
        """machines.json: who has which ranks, and where its part of the run folder is."""
        sizes = self.sizes
        firsts = [sum(sizes[:machine]) for machine in range(len(sizes))]
        parts = zip(self.crew.links, firsts, sizes, self.opened, self.addresses, strict=True)
        write_json(
            self._folder.machines,
            [
                {"host": link.machine.host, "port": link.machine.port, "here": link.here,
                 "local": link.here or answer.shared, "ranks": [first, size], "folder": answer.folder,
                 "address": address.address, "interface": address.interface}
                for link, first, size, answer, address in parts
            ],
        )  # fmt: skip


def describe(
    crew: Crew, sizes: Sequence[int], addresses: Sequence[Address], places: StorePlaces, through_ssh: Way | None = None
) -> list[str]:
    """Who takes part, and what listens where."""
    names = [link.machine.name for link in crew.links]
    who = ", ".join(f"{name} ({size})" if size > 1 else name for name, size in zip(names, sizes, strict=True))
    total = sum(sizes)
    lines = [f"{total} process{'es' if total > 1 else ''} on {who}"]
    if all(link.here for link in crew.links):
        return lines
    if through_ssh:
        return [*lines, through_ssh.told()]
    where = ", ".join(
        f"{name} {address.address} ({address.interface})" for name, address in zip(names, addresses, strict=True)
    )
    first = addresses[0].address
    if places.why_open:
        lines.append(
            f"{places.why_open}; so the store listens on {first} port {places.ends[0][1]}, open to whoever reaches it, "
            "without a password"
        )
    lines.append(
        f"between them: {where}; {'' if places.why_open else 'the store listens on loopback alone, through ssh, and '}"
        "each process on free ports of its machine's address: open to whoever reaches them, without a password; "
        "gradients travel unencrypted"
    )
    return lines
