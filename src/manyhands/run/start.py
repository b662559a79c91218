"""Prepares each start of a launched run: machines, run folders, addresses, torch's store, and orders to agents."""

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from manyhands.checkpoint.folders import saved_step
from manyhands.cluster.agents import folders, open_tunnels, protocol, tunnel
from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.connection import AgentConnection, LinkClosed
from manyhands.cluster.agents.machines import Machines, RunMachine
from manyhands.cluster.agents.mirror import RecordReceiver, RecordSender
from manyhands.cluster.code_files import with_absolute_paths
from manyhands.cluster.doctor.findings import examine
from manyhands.cluster.hosts.inventory import LOOPBACK, Address, Rendezvous
from manyhands.cluster.hosts.this_process import with_machines
from manyhands.cluster.messages import Request, call
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_DOCTOR, RunError
from manyhands.core.records import write_json
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import COPY_S, OPEN_FOLDER_S, TAKE_OVER_S
from manyhands.parallel.group import ports, tunnel_ends
from manyhands.run.doctor import describe_public_addresses, survey_agents
from manyhands.run.machines import REPLACED, Membership, RefusedError, remote_folder_path
from manyhands.run.recovery import Say, resuming_job


class StartSetup(contextlib.ExitStack):
    """Prepares each start of a run. As a context manager, closes the ssh tunnels at the end."""

    def __init__(self, job: Job, membership: Membership, folder: RunFolder, receiver: RecordReceiver, say: Say) -> None:
        super().__init__()
        self._job, self._membership, self._machines = job, membership, membership.machines
        self._folder, self.receiver, self._say = folder, receiver, say
        self._script, self._holder = bool(job.run.script), secrets.token_hex(16)
        self._store, self.tunnels = self.enter_context(open_tunnels.StoreTunnel(job.cluster)), tunnel.MachineTunnels()
        self.callback(self.tunnels.close)
        self._ssh_only = False  # no network connects the machines
        self._routes: open_tunnels.TunnelRoutes | None = None  # of this start, if only ssh connects its machines
        self._first_saved: int | None = None  # newest step saved before the first start
        self._copy: tuple[AgentConnection, str, RecordSender] | None = None  # to the machine with a copy of the records
        self._copy_at = 0.0  # time of the next copy

    def orders(self, job: Job, number: int) -> dict[AgentConnection, protocol.Orders]:
        """Prepares start `number`; returns orders by agent. Raises ManyhandsError without machines or a checkpoint."""
        for machine in self._machines.running:
            machine.joined = False
        why_open = self._reconnect() if number else self._connect()
        running, term = self._machines.running, self._membership.term
        job = job.model_copy(update={"cluster": with_machines(job.cluster, self._membership.added_machines)})
        if self.newest_step != self._first_saved:  # even if the records here don't show it yet
            job = resuming_job(job)
        self._membership.record_start(number)
        self._choose_copy()
        write_log_locations(self._folder, self._machines)
        if term:
            folders.advance_term(self._folder.ranks, folders.Term(term, number))
        for line in describe(self._machines, why_open, self._routes):
            self._say(line, "INFO")
        if job.cluster.sync_code:
            job = with_absolute_paths(job)
        sizes, orders = tuple(machine.processes for machine in running), dict[AgentConnection, protocol.Orders]()
        for position, machine in enumerate(running):
            tunnels = self._routes.ends[machine.name].environment() if self._routes else {tunnel_ends.VARIABLE: ""}
            rendezvous = Rendezvous(sizes, position, *machine.store, machine.spec.devices)
            environment = {**machine.address.environment(), **tunnels}
            order = protocol.orders_for(job, "train", machine.run_folder.folder, rendezvous)
            orders[machine.agent] = replace(
                order, device=machine.device, environment=environment, generation=number, term=term
            )
        return orders

    def _reconnect(self) -> str:
        """Connects the machines for a restart, without those that are lost meanwhile. Returns `_connect`'s result."""
        while True:
            try:
                self._add_joining()
                if why := self._membership.shortage_reason():
                    raise RunError(why)
                self._reopen_folders()
                return self._connect()
            except (LinkClosed, open_tunnels.NoTunnelError) as error:
                # A machine that the others can't reach is treated as lost.
                name = error.alone if isinstance(error, open_tunnels.NoTunnelError) else error.where
                machine = next(machine for machine in self._machines.running if machine.name == name)
                machine.agent.close(0.0)
                if too_few := self._membership.shortage_reason():
                    self._say(f"{error.message}: {too_few}", "INFO")
                    raise
                self._say(f"{error.message}: continuing without {name}", "INFO")
                if machine.joined and isinstance(error, open_tunnels.NoTunnelError):
                    self._membership.refuse(machine, error)

    def _add_joining(self) -> None:
        """Adds ready machines whose run folders can be opened, if all machines can reach each other."""
        joining = [machine for machine in self._membership.add_ready_machines() if self._open_folder_on(machine)]
        if not joining:
            return
        alone = len(self._machines.running) == 1 + len(joining)
        try:
            addresses = check_machines(self._job, self._say, self._machines)
            if not (addresses or self._ssh_only or alone):
                what = "the other machines are connected without ssh, but can reach this machine only through ssh"
                raise RunError(what)
        except RunError as error:
            others_lost = any(machine.agent.closed for machine in self._machines.running if machine not in joining)
            for machine in joining:
                if others_lost:
                    machine.exclude(0.0)
                else:
                    self._membership.refuse(machine, error)
        else:
            self.set_addresses(addresses)

    def _open_folder_on(self, machine: RunMachine) -> bool:
        """Opens the run folder on a machine that joins. Returns False if the machine is lost or refused."""
        try:
            self._open_on([machine], None, OPEN_FOLDER_S)
            if machine.run_folder.taken:
                raise RefusedError(f"a run is active in {machine.run_folder.folder} on that machine")
        except LinkClosed:
            machine.lose()
        except (RefusedError, RunError) as error:
            self._membership.refuse(machine, error)
        else:
            return True
        return False

    def set_addresses(self, addresses: dict[RunMachine, Address]) -> None:
        """Sets the address of each machine for the other machines; an empty dict means that only ssh connects them."""
        self._ssh_only = not addresses
        for machine, address in addresses.items():
            machine.address = address

    def _connect(self) -> str:
        """Opens the store's port on the first machine, after ssh tunnels if only ssh connects the machines.

        Returns the reason why other hosts can reach the port, or "" for a loopback port; see `StoreTunnel.open`.
        """
        self._routes = None
        if self._ssh_only:
            for machine in self._machines.running:
                machine.address = Address("", LOOPBACK)
        if not self._ssh_only or len(self._machines.running) == 1:
            return self._store.open(self._machines)
        self._routes = open_tunnels.join_through_ssh(self._machines, self._job.cluster, self.tunnels)
        for machine in self._machines.running:
            machine.address = Address(ports.loopback_interface(), self._routes.ends[machine.name].address)
        open_tunnels.open_store(self._machines)
        return ""

    @property
    def newest_step(self) -> int:
        return max(machine.run_folder.saved for machine in self._machines.running)

    def open_folders(self, held: dict[str, int] | None) -> None:
        """Opens the run folder on every machine. Raises RunError if another launcher has taken over the run.

        The first machine then sends its new records to the launcher, and rank 0's output if the run is a user's script.
        `held` is the size of each growing file that the launcher has; {} makes the launcher rename its old files. If
        `held` is None, no records are sent.
        """
        term = self._membership.term
        self._open_on(self._machines.running, held, TAKE_OVER_S if term else OPEN_FOLDER_S)
        highest = max(machine.run_folder.term for machine in self._machines.running)
        if highest > term > 0:
            if self._first_saved is not None:
                raise RunError(REPLACED)
            self._membership.term = highest + 1
            self.open_folders(held)
        elif self._first_saved is None:
            self._first_saved = self.newest_step

    def _open_on(self, machines: Sequence[RunMachine], held: dict[str, int] | None, timeout_s: float) -> None:
        """Opens the run folder on `machines`; `held` applies to the first machine. Raises RunError."""
        marker = self._folder.ranks / f".shared-{secrets.token_hex(8)}"  # shows machines that they share the folder
        here, run, term = str(self._folder.path.absolute()), folders.run_id(self._folder), self._membership.term
        requests = dict[RunMachine, Request[protocol.RunOpened]]()
        for number, machine in enumerate(machines):
            place = here if machine.agent.here else remote_folder_path(machine, self._folder)
            known = None if number else held
            wanted = protocol.OpenRun(place, marker.name, self._holder, run, known, self._script, term)
            requests[machine] = call(Agent.open_run, wanted)
        marker.touch()
        try:
            for machine, answer in self._machines.ask(requests, timeout_s).items():
                machine.opened_folder = answer
        finally:
            marker.unlink()

    def _reopen_folders(self) -> None:
        """Opens the run folders for a restart, and gives rank 0 to a machine with the newest checkpoint."""
        self.open_folders(None)
        last_step = saved_step(self._folder)
        if self.newest_step < 0 and last_step is not None and not self._script:
            raise RunError(f"no remaining machine has a checkpoint; the last one was saved at step {last_step}")
        self._send_records(self._newest_first())
        self.open_folders(self.receiver.file_sizes())

    def resume_from_newest(self) -> None:
        """Gives rank 0 to a machine with the newest checkpoint, and copies records from or to that machine."""
        before, last_step = self._machines.running[0], saved_step(self._folder)
        first = self._newest_first()
        if first is before:
            return
        step = first.run_folder.saved
        self._say(f"{first.name} has the newest checkpoint (step {step}) and gets rank 0", "INFO")
        behind = last_step is None or last_step < step
        if not behind:
            self._send_records(first)
        self.open_folders({} if behind else self.receiver.file_sizes())

    def _newest_first(self) -> RunMachine:
        """Moves the machines with the newest checkpoint to the front; returns the first machine."""
        newest, running = self.newest_step, self._machines.running
        self._machines.all.sort(key=lambda machine: machine not in running or machine.run_folder.saved < newest)
        return self._machines.running[0]

    def _send_records(self, machine: RunMachine) -> None:
        """Sends the records of this run folder to the machine that gets rank 0, unless it shares the folder."""
        if machine.agent.here or machine.run_folder.shared:
            return
        # The last records of a lost machine may not have been received.
        held = {} if machine.records_may_differ else machine.run_folder.held
        sender = RecordSender(self._folder.path, held, partial=True)
        self._send_all(machine.agent, machine.run_folder.folder, sender)
        machine.records_may_differ = False

    def _send_all(self, link: AgentConnection, folder: str, sender: RecordSender) -> None:
        while pieces := list(sender.new_pieces()):
            link.ask(call(Agent.keep_records, folder, pieces), COPY_S, self._machines.links)

    def _choose_copy(self) -> None:
        """Selects the machine that keeps a copy of the records: the first one that has locked a folder of its own."""
        first, *others = self._machines.running
        machine, self._copy = next((machine for machine in others if machine.run_folder.own), None), None
        if machine and (first.run_folder.shared or first.run_folder.own):
            held = {} if machine.records_may_differ else machine.run_folder.held
            self._copy = machine.agent, machine.run_folder.folder, RecordSender(self._folder.path, held)

    def copy_records(self) -> None:
        """Sends new records to the machine that keeps a copy, at most every 0.4 s, without waiting for an answer."""
        if self._copy and time.monotonic() >= self._copy_at:
            (link, folder, sender), self._copy_at = self._copy, time.monotonic() + 0.4
            if not link.closed and (pieces := list(sender.new_pieces())):
                link.post(call(Agent.keep_records, folder, pieces))

    def finish_copy(self) -> None:
        """Sends the remaining records to the machine with the copy; waits until they arrive or the machine is lost."""
        if self._copy:
            with contextlib.suppress(RunError):
                self._send_all(*self._copy)


def check_machines(job: Job, say: Say, machines: Machines) -> dict[RunMachine, Address]:
    """Runs the doctor's checks, unmeasured. Returns {machine: address}; {} for ssh only. Raises RunError."""
    running = machines.running
    if len(running) == 1:
        return {running[0]: Address("", LOOPBACK)}
    survey = survey_agents(job, machines, [machine.spec for machine in running], measure=False)
    found = examine(survey)
    failures = [finding for finding in found if finding.severity == "fail"]
    apart = bool(failures) and all(finding.check == "reach" for finding in failures)
    public = describe_public_addresses(survey.chosen)
    allowed = not job.cluster.interface or (apart and job.cluster.relay)
    through_ssh = job.cluster.through_ssh or (bool(apart or public) and allowed)
    if apart and through_ssh:
        say(f"{failures[0].what}: trying ssh between the machines", "INFO")
    elif failures:
        others = [f"also: {finding.what}" for finding in failures[1:]]
        error = RunError(failures[0].what, ", ".join(failures[0].hosts), (*failures[0].hints, *others))
        error.exit_code = EXIT_DOCTOR
        raise error
    if public and through_ssh and not job.cluster.through_ssh:
        say(f"{public}: connecting through ssh; to connect unencrypted, use --interface NAME", "INFO")
    for finding in found:
        # Load and other jobs may change within a minute.
        if finding.severity == "warn" and finding.check not in {"cpu", "jobs"}:
            say(finding.what, "WARNING")
    return {} if through_ssh else {machine: Address(*survey.chosen[machine.name]) for machine in running}


def describe(machines: Machines, why_open: str, routes: open_tunnels.TunnelRoutes | None = None) -> list[str]:
    """Returns lines for the user that describe the processes of a start, the addresses and the open ports."""
    running = machines.running
    who = [f"{one.name} ({one.processes})" if one.processes > 1 else one.name for one in running]
    total = sum(machine.processes for machine in running)
    lines = [f"{total} process{'es' if total > 1 else ''} on {', '.join(who)}"]
    if len(running) == 1 or all(machine.agent.here for machine in running):
        return lines
    if routes:
        return [*lines, routes.summary()]
    where = [f"{machine.name} {machine.address.address} ({machine.address.interface})" for machine in running]
    if why_open:
        address, port = running[0].store
        store = f"{why_open}; so the store listens on {address} port {port}"
        lines.append(f"{store}, open without a password to every host that reaches the port")
    store = "" if why_open else "the store listens on loopback only, through ssh; "
    each = "each process listens on free ports of its machine's address, open without a password to every host that "
    return [*lines, f"network: {', '.join(where)}; {store}{each}reaches the ports; gradients are sent unencrypted"]


def write_log_locations(folder: RunFolder, machines: Machines) -> None:
    """Writes machines.json: the ranks and the run folder of each machine."""
    first, places = 0, list[dict[str, object]]()
    for one in machines.running:
        here, address = one.agent.here, one.address
        places.append(
            {"host": one.spec.host, "port": one.spec.port, "here": here, "local": here or one.run_folder.shared,
             "ranks": [first, one.processes], "folder": one.run_folder.folder, "address": address.address,
             "interface": address.interface}
        )  # fmt: skip
        first += one.processes
    write_json(folder.machines, places)
