"""Launches and monitors a job on several machines over ssh; handles --detach and requests of `manyhands join`."""

import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from manyhands.checkpoint.folders import saved_step
from manyhands.cluster import code_files, messages
from manyhands.cluster.agents import agent, folders, mirror, protocol, ssh, supervise, worker_start
from manyhands.cluster.agents.machines import Machines, prepare_machines, started_agents
from manyhands.cluster.hosts.formats import hostfile
from manyhands.cluster.hosts.inventory import Machine
from manyhands.config.job import Job
from manyhands.core import files, records, stops, terminal, timeouts
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.run_folder import RunFolder, resume_command
from manyhands.report.screen import Screen
from manyhands.run import doctor, logs, recovery, registry, start
from manyhands.run.folder import run_folder
from manyhands.run.machines import Membership
from manyhands.run.outcome import Outcome, conclude, record_event, recording_errors, starts_and_stops
from manyhands.run.train import check_names, watch_hooks

SOCKET, LOG = "head.sock", "head.log"  # in the run folder
# A request through the socket, and the start of the answer to a machine that has joined.
_REQUEST, _JOINED = re.compile(rb"join (.+)\n", re.DOTALL), "joined: "


def launch(
    job: Job, machines: Sequence[Machine], *, quiet: bool = False, on_train: Callable[[Path], None] = lambda _run: None
) -> Outcome:
    """Trains on several machines, with rank 0 on the first one. Calls `on_train(run folder)` during training."""
    if not job.run.script:
        check_names(job, data=False)
    if len(machines) not in job.cluster.machines_wanted:
        what = f"--elastic {job.cluster.elastic} does not allow {len(machines)} machines"
        raise UserError(what, "--elastic", ("name another number of machines, or change --elastic MIN:MAX",))
    if job.cluster.detach and job.cluster.relay:
        what = "a run with --relay can't be detached, because this machine relays its traffic"
        raise UserError(what, "--detach", ("remove --detach or --relay",))
    with run_folder(job) as folder:
        receiver, earlier = mirror.RecordReceiver(folder.path), len(starts_and_stops(folder))
        shown = closing(Screen(folder.path, quiet=quiet, lines=job.cluster.detach))
        with recording_errors(job, folder), shown as screen:
            names = ", ".join(machine.name for machine in machines)
            screen.say(f"connecting to {names} and starting agents; this takes some seconds")
            if job.cluster.debugging:
                screen.say(worker_start.attach_notice(job.cluster))
            if len(machines) > 1 and not job.cluster.through_ssh:
                screen.say(doctor.LISTENING)
            wanted, on_stop = doctor.facts_wanted(job), lambda: screen.say("stopping before training has begun")
            with started_agents(machines, job.cluster, folder.ranks, wanted, on_stop) as found, ExitStack() as stack:
                _require_enough(job, folder, found, screen)
                executed = {name: str(getattr(job.cluster, name)) for name in logs.EXECUTED}
                registry.save_ssh_options(folder.path, executed)
                membership = stack.enter_context(closing(Membership(job, found, folder, screen.say)))
                starts = stack.enter_context(start.StartSetup(job, membership, folder, receiver, screen.say))
                _prepare_run(job, membership, starts, folder, screen)
                watch = watch_hooks(job, folder, screen, quiet=quiet)
                show_news = watch.on_tick
                handle_requests = stack.enter_context(join_listener(folder.path, membership.add, screen.say))

                def on_tick() -> None:
                    show_news()
                    if membership.trained or job.run.script:
                        on_train(folder.path)

                def regroups() -> bool:
                    handle_requests()
                    membership.tick()
                    starts.copy_records()
                    return membership.regroups()

                watch.on_tick, watch.regroups, watch.lost_tunnel = on_tick, regroups, starts.tunnels.ended
                _keep_records(watch, receiver, screen, found.running[0].name)
                ending = recovery.run_to_end(job, folder, membership, starts.orders, watch, screen.say)
                starts.finish_copy()
                if ending.replaced:  # further records are in the other launcher's folder
                    record_event(folder, records.REPLACED, ending.replaced, step=saved_step(folder))
        return conclude(job, folder, ending, earlier)


def _require_enough(job: Job, folder: RunFolder, machines: Machines, screen: Screen) -> None:
    """Raises RunError if a machine doesn't answer, unless the run is resumed and the other machines are enough."""
    resumes = job.cluster.recovers and saved_step(folder) is not None and job.checkpoint.resume == "auto"
    if not (resumes and len(machines.running) >= max(1, job.cluster.machines_wanted.start)):
        machines.require_all()
    for machine in machines.waiting:
        if machine.problem:
            screen.say(f"{machine.problem.message}: continuing without this machine", "WARNING")
            machine.problem = None


def _keep_records(watch: supervise.WatchHooks, receiver: mirror.RecordReceiver, screen: Screen, source: str) -> None:
    """Makes `watch` write records to this run folder until a write fails. `source`: the machine that sends them."""

    def keep(piece: protocol.FilePiece) -> None:
        try:
            receiver.write_piece(piece)
        except (OSError, ValueError) as error:
            watch.on_file = lambda _piece: None
            what = f"the records of the run can no longer be written on this machine: {error}"
            screen.say(f"{what}; new records are stored on {source} only", "WARNING")

    watch.on_file = keep


def _prepare_run(job: Job, membership: Membership, starts: start.StartSetup, folder: RunFolder, screen: Screen) -> None:
    machines = membership.machines
    addresses = start.check_machines(job, screen.say, machines)  # first, so that a mistake leaves no folders
    prepare_machines(machines, job.cluster)
    if not addresses:
        _refuse_devices(job, machines)
    starts.set_addresses(addresses)
    starts.open_folders(starts.receiver.file_sizes())
    _refuse_another_run(job, folder, machines)
    if job.checkpoint.resume == "auto" and not job.run.script:
        starts.resume_from_newest()
    _refuse_lost_checkpoints(job, folder, machines)
    if job.cluster.sync_code:
        membership.code, left_out = code_files.read_code_files(Path.cwd())
        for line in left_out:
            screen.say(line)
        others = [machine for machine in machines.running if not machine.agent.here]
        # Agents, and thus their workers, change to the folder of the code.
        machines.ask(dict.fromkeys(others, messages.call(agent.Agent.take_code, membership.code)), timeouts.COPY_S)


def _refuse_devices(job: Job, machines: Machines) -> None:
    """Raises UserError if the collectives would not use gloo, the only backend that works through ssh."""
    others = sorted({machine.device for machine in machines.running} - {"cpu"})
    if others and job.cluster.backend != "gloo":
        what = f"only ssh connects these machines, and collectives of {', '.join(others)} devices can't go through ssh"
        hints = ("use --backend gloo, which copies through CPU memory", "or --device cpu",
                 "or put the machines into one network",
                 "or name a trusted network with public addresses: --interface NAME")  # fmt: skip
        raise UserError(what, "cluster.backend", hints)


def _refuse_another_run(job: Job, folder: RunFolder, machines: Machines) -> None:
    resumes = job.run.out and job.checkpoint.resume != "never"
    for machine in machines.running:
        name, answer, place = machine.name, machine.run_folder, machine.run_folder.folder
        another = "choose another --out runs/NAME"
        if answer.taken:
            hints = ("wait until the run ends, or stop it where it was launched", f"or {another}")
            raise UserError(f"a run is active in {name}:{place}", "--out", hints)
        if machine.agent.here or answer.shared or not answer.checkpoints:
            continue
        found = answer.run
        if found and found != folders.run_id(folder):
            copy = ssh.scp_command(machine.spec, place, str(folder.path))
            hints = (another, f"or, to resume that run, copy it to a new folder: {copy}")
            what = f"the folder {place} on {name} belongs to a different run than {folder.path}"
            raise UserError(what, "--out", hints)
        if not found and not resumes:
            hints = (another, "or resume that run: name its folder with --out, and add --resume auto")
            raise UserError(f"the folder {place} on {name} already contains a run", "--out", hints)


def _refuse_lost_checkpoints(job: Job, folder: RunFolder, machines: Machines) -> None:
    saved, first = saved_step(folder), machines.running[0]
    if saved is not None and job.checkpoint.resume == "auto" and not first.run_folder.checkpoints:
        had = next((f" on {place.host}" for place in logs.read_log_locations(folder)), "")
        what = f"{first.name} has no checkpoint of {folder.path}; the last checkpoint was saved at step {saved}{had}"
        hints = ("list the machine with the checkpoint first", "or copy its run folder to rank 0", "or use a new --out")
        raise UserError(what, f"{first.name}:{first.run_folder.folder}/checkpoints", hints)


@contextmanager
def join_listener(folder: Path, on_request: Callable[..., None], say: recovery.Say) -> Generator[Callable[[], None]]:
    """Listens for `manyhands join`; yields a function that handles pending requests without blocking.

    `on_request(machine, notify)` adds a machine, or raises ManyhandsError to refuse it. `notify` answers the client.
    """
    path, clients = folder / SOCKET, dict[socket.socket, bytes]()  # bytes received from each client
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        try:
            path.unlink(missing_ok=True)
            listener.setblocking(False)
            with _short_path(path) as short:
                listener.bind(short)
            path.chmod(0o600)
            listener.listen()
        except OSError as error:
            say(f"manyhands join can't add machines to this run: {error.strerror} ({path})", "WARNING")

        def tick() -> None:
            with suppress(OSError):  # no new client, or too many open files
                while True:
                    client = listener.accept()[0]
                    client.setblocking(False)
                    clients[client] = b""
            for client in list(clients):
                with suppress(BlockingIOError):
                    _answer_client(client, clients, on_request)

        try:
            yield tick
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            for client in clients:
                client.close()


def _answer_client(client: socket.socket, clients: dict[socket.socket, bytes], on_request: Callable[..., None]) -> None:
    def notify(text: str, takes_part: bool) -> None:
        with suppress(OSError):  # the client may have exited
            client.sendall((_JOINED * takes_part + text).encode(errors="replace"))
        clients.pop(client, None)
        client.close()

    try:
        received = client.recv(1 << 16)
    except ConnectionError:
        received = b""
    request = _REQUEST.fullmatch(sent := clients[client] + received)
    clients[client] = b"" if request else sent
    if not request:
        if not received or len(sent) > 1 << 16:
            notify("", False)
        return
    try:
        (machine,) = hostfile.read_list(os.fsdecode(request[1]), "--host").machines
        on_request(machine, notify)
    except ManyhandsError as error:
        notify("; ".join([error.message, *error.hints]), False)
    except ValueError:
        notify("join adds one machine at a time", False)


@contextmanager
def _short_path(path: Path) -> Generator[str]:
    """Yields a path of the socket `path` that is shorter than the system's limit of about 100 bytes."""
    if len(os.fsencode(path)) < 100 or not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def request_join(run: str, host: str) -> str:
    """Asks a run's launcher to add `host`; returns its message. Raises ManyhandsError if the request is refused."""
    found = registry.find_run(run, active=True)
    folder = found.path
    if not (folder / SOCKET).exists() and not (head := registry.require_launcher(found)).is_local:
        hints = (f"run this on {head.host}: manyhands join {shlex.quote(run)} --host {host}",)
        raise UserError(f"{head.name} was launched from {head.host}, not from this machine", head.run, hints)
    with socket.socket(socket.AF_UNIX) as head:
        try:
            with _short_path(folder / SOCKET) as short:
                head.connect(short)
        except OSError:
            hints = ("name an active run that was started by manyhands launch",)
            raise UserError("the launcher of the run does not answer", str(folder), hints) from None
        head.sendall(b"join " + os.fsencode(host) + b"\n")
        with head.makefile(encoding="utf-8") as answer:
            text = answer.read()
    if text.startswith(_JOINED):
        return text.removeprefix(_JOINED)
    raise RunError(text, host) if text else RunError(f"the run ended before {host} joined", str(folder))


class DetachedLauncher:
    """Forks for --detach: the child launches the run, and the parent waits. `child_pid` is 0 in the child."""

    def __init__(self) -> None:
        self._heard, self._writer = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Blocked signals are delivered once `wait` forwards them.
        self._unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, stops.STOPS)
        self.child_pid = os.fork()
        if not self.child_pid:
            os.setsid()  # Ctrl-C and the end of the terminal don't reach this process
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.close(self._heard)
            self._left = False
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)

    def leave(self, run: Path) -> None:
        """Detaches the child from the terminal: redirects stdout and stderr to a log in the run folder."""
        if self._left:
            return
        self._left = True
        with files.private_files(), (run / LOG).open("ab") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        os.write(self._writer, os.fsencode(run))
        os.close(self._writer)

    def wait(self, *, as_json: bool) -> int:
        """Waits in the parent until training starts or the run ends, and forwards signals; returns the exit code."""
        os.close(self._writer)
        with stops.on_stop(lambda number, _: os.kill(self.child_pid, number)), os.fdopen(self._heard, "rb") as heard:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)
            run = Path(os.fsdecode(heard.read()))
            if not run.name:
                return os.waitstatus_to_exitcode(os.waitpid(self.child_pid, 0)[1]) & 0xFF
        if as_json:
            terminal.show_json({"run": str(run), "status": "running", "pid": self.child_pid, "log": str(run / LOG)})
        else:
            terminal.show([
                f"{run} keeps training without this terminal; launcher log: {run / LOG}",
                f"to stop: manyhands stop {run}",
                f"to resume on another machine of the run, if this machine is lost: {resume_command(run)}",
            ])  # fmt: skip
        return 0
