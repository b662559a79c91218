"""One job on several machines: assembles their agents over ssh, starts the workers, and watches all to the end."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from manyhands.cluster.agents.assemble import AgentLinks, assembled, prepare, refuse_doubles
from manyhands.cluster.agents.claim import run_id
from manyhands.cluster.agents.code import code_files
from manyhands.cluster.agents.debugger import attach_notice
from manyhands.cluster.agents.mirror import Receiver
from manyhands.cluster.agents.protocol import FilePiece, RunOpened, TakeCode
from manyhands.cluster.agents.ssh import copied_by
from manyhands.cluster.agents.store_tunnel import store_tunnel
from manyhands.cluster.agents.supervise import supervise_once
from manyhands.cluster.doctor.questions import AskClock
from manyhands.cluster.hosts.inventory import Machine
from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.records import read_lines
from manyhands.core.resuming import saved_step
from manyhands.core.run_folder import RunFolder
from manyhands.report.screen import Screen
from manyhands.run.doctor import LISTENING, facts_wanted
from manyhands.run.failure_log import ends_noted, note_replaced, starts_and_stops
from manyhands.run.join import join_listener
from manyhands.run.logs import reach_of, read_places
from manyhands.run.on_machines import AgentMachines
from manyhands.run.pending import PendingMachines
from manyhands.run.preflight import check_machines, judge
from manyhands.run.recovery import Recovery
from manyhands.run.registry import remember_reach
from manyhands.run.script import shown
from manyhands.run.train import Outcome, check_names, conclude, run_folder, watch_on

NOT_BEGUN = "stopping before training has begun"
# What a slow line needs for the code of a folder.
CODE_S = 120.0


def launch(
    job: Job, machines: Sequence[Machine], *, quiet: bool = False, begun: Callable[[Path], None] = lambda _run: None
) -> Outcome:
    """Trains on several machines, the first of which has rank 0.

    `quiet` shows no progress; `begun` is called often with the run folder, once the run trains.

    Raises:
        ManyhandsError: a machine can't be used, or the run failed; the first cause is in it.
    """
    refuse_doubles(machines)
    if not job.run.script:
        check_names(job, data=False)
    if len(machines) not in job.cluster.machines_wanted:
        what = f"--elastic {job.cluster.elastic} does not allow {len(machines)} machines"
        raise UserError(what, "--elastic", ("name another number of machines, or change --elastic MIN:MAX",))
    if job.cluster.detach and job.cluster.relay:
        what = "a run with --relay can't be detached, because this machine relays its traffic"
        raise UserError(what, "--detach", ("remove --detach or --relay",))
    with run_folder(job) as folder:
        receiver, earlier = Receiver(folder.path), len(starts_and_stops(folder))
        with ends_noted(job, folder), closing(Screen(folder.path, quiet=quiet, lines=job.cluster.detach)) as screen:
            names = ", ".join(machine.name for machine in machines)
            screen.say(f"connecting to {names} and starting agents; this takes some seconds")
            if job.cluster.debugging:
                screen.say(attach_notice(job.cluster))
            if len(machines) > 1 and not job.cluster.through_ssh:
                screen.say(LISTENING)
            reached = assembled(machines, job.cluster, folder.ranks, facts_wanted(job), lambda: screen.say(NOT_BEGUN))
            with ExitStack() as stack, reached as agents, store_tunnel(job.cluster) as way:
                absent = _absent(job, folder, agents, machines, screen)
                remember_reach(folder.path, reach_of(job.cluster))
                pending = stack.enter_context(
                    closing(PendingMachines(job, folder, partial(judge, job, agents), screen.say))
                )
                run_machines = _ready(job, agents, folder, receiver, screen, pending, absent)
                stack.callback(run_machines.head_tunnels.close)
                show_news = shown(job, folder, screen, quiet=quiet)

                def on_tick() -> None:
                    show_news()
                    if run_machines.steps or job.run.script:
                        begun(folder.path)

                watch = replace(
                    watch_on(job, screen, on_tick),
                    on_file=_Keeper(receiver, screen, agents.links[0].machine.name),
                    clock_offsets_s=agents.clock_offsets_s,
                    cut=run_machines.head_tunnels.ended,
                    regroups=run_machines.regroups,
                )
                run_machines.hear = stack.enter_context(
                    join_listener(folder.path, run_machines.add_pending, screen.say)
                )
                recovery = Recovery(job, folder, screen.say, run_machines)
                while recovery.again(ending := supervise_once(agents.links, run_machines.orders(recovery, way), watch)):
                    run_machines.handle_ending(ending)
                if run_machines.copy:
                    run_machines.copy.finish()
                if ending.replaced:
                    note_replaced(folder, ending.replaced)
        return conclude(job, folder, ending, earlier)


def _absent(
    job: Job, folder: RunFolder, agents: AgentLinks, machines: Sequence[Machine], screen: Screen
) -> Sequence[Machine]:
    """Who doesn't answer, where a run that has saved can go on without, as `--elastic` says.

    Raises:
        RunError: one is needed that doesn't answer.
    """
    there = [link.machine for link in agents.links]
    resumes = job.cluster.recovers and saved_step(folder) is not None and job.checkpoint.resume == "auto"
    if not (resumes and there and len(there) >= job.cluster.machines_wanted.start):
        agents.require_all()
    for contact in agents.contacts.values():
        screen.say(f"{contact.what}: continuing without this machine", "WARNING")
    agents.contacts.clear()
    return [machine for machine in machines if machine not in there]


class _Keeper:
    """Keeps the records that come; where that fails, the run goes on and its records stay where they are written."""

    def __init__(self, receiver: Receiver, screen: Screen, source: str) -> None:
        self._receiver, self._screen, self._source, self._works = receiver, screen, source, True

    def __call__(self, piece: FilePiece) -> None:
        if not self._works:
            return
        try:
            self._receiver.take(piece)
        except (OSError, ValueError) as error:
            self._works = False
            what = f"the records of the run can't be written here any more: {error}"
            self._screen.say(f"{what}; new records are on {self._source} only", "WARNING")


def _ready(
    job: Job,
    agents: AgentLinks,
    folder: RunFolder,
    receiver: Receiver,
    screen: Screen,
    pending: PendingMachines,
    absent: Sequence[Machine],
) -> AgentMachines:
    """Everything that comes before the workers: addresses, sizes, folders, code."""
    addresses = check_machines(job, screen.say, agents)
    # First what the user's mistakes show in, so that they leave no folders elsewhere.
    sizes, devices = prepare(agents, [link.machine.slots for link in agents.links], job.cluster)
    again = partial(check_machines, job, screen.say)
    machines = AgentMachines(job, agents, sizes, devices, addresses, folder, receiver, screen.say, again, pending)
    if not addresses:
        _refuse_devices(job, devices)
    opened = machines.folders.open(output=bool(job.run.script))
    _refuse_another_run(job, folder, agents, opened)
    if job.checkpoint.resume == "auto" and not job.run.script:
        machines.resume_from_newest(absent)
    _refuse_lost_checkpoints(job, folder, agents, machines.folders.opened[0])
    if job.cluster.sync_code:
        pending.code = _share_code(agents, screen)
    return machines


def _refuse_devices(job: Job, devices: Sequence[str]) -> None:
    """Only gloo goes through ssh. Raises UserError: the processes would talk by something else."""
    if any(device != "cpu" for device in devices) and job.cluster.backend != "gloo":
        others = ", ".join(sorted({*devices} - {"cpu"}))
        what = f"only ssh connects these machines, and collectives of {others} devices can't go through ssh"
        hints = (
            "use --backend gloo, which copies through CPU memory",
            "or --device cpu",
            "or put the machines into one network",
            "or name a trusted network with public addresses: --interface NAME",
        )
        raise UserError(what, "cluster.backend", hints)


def _refuse_another_run(job: Job, folder: RunFolder, agents: AgentLinks, opened: Sequence[RunOpened]) -> None:
    """No machine's folder of this name may be in use, or hold what was saved by a run that isn't this one.

    Raises:
        UserError: one does; its checkpoints would be taken for this run's.
    """
    resumes = job.run.out and job.checkpoint.resume != "never"
    for link, answer in zip(agents.links, opened, strict=True):
        name, place = link.machine.name, answer.folder
        if answer.taken:
            hints = ("wait for its end, or stop the run where it was launched", "or choose another --out runs/NAME")
            raise UserError(f"a run is active in {name}:{place}", "--out", hints)
        if link.here or answer.shared or not answer.checkpoints:
            continue
        found = answer.run
        if found and found != run_id(folder):
            copy = copied_by(link.machine, place, str(folder.path))
            hints = ("choose another --out runs/NAME", f"or, to resume that run, copy it to a new folder: {copy}")
            raise UserError(f"{name} holds another run in {place} than {folder.path}", "--out", hints)
        if not found and not resumes:
            hints = ("choose another --out runs/NAME", "or resume that run: name its folder with --out")
            raise UserError(f"{name} already holds a run in {place}", "--out", hints)


def _refuse_lost_checkpoints(job: Job, folder: RunFolder, agents: AgentLinks, opened: RunOpened) -> None:
    """A run that has saved must not begin anew because the first machine has lost, or never had, what was saved.

    Raises:
        UserError: there is no checkpoint where rank 0 looks for one.
    """
    saved = [line.get("step") for line in read_lines(folder.events) if line.get("kind") == "saved"]
    link = agents.links[0]
    if saved and job.checkpoint.resume == "auto" and not opened.checkpoints:
        had = next((place.host for place in read_places(folder)), "")
        raise UserError(
            f"{link.machine.name} has no checkpoint of {folder.path}; the last checkpoint is of step {saved[-1]}"
            + (f" on {had}" if had else ""),
            f"{link.machine.name}:{opened.folder}/checkpoints",
            ("name the machine with the checkpoint first", "or copy the folder there", "or choose another --out"),
        )


def _share_code(agents: AgentLinks, screen: Screen) -> dict[str, str]:
    """This folder's code on every other machine, in a folder of its own; the agent, and so its workers, go there."""
    files, left = code_files(Path.cwd())
    for line in left:
        screen.say(line)
    agents.ask([AskClock() if link.here else TakeCode(files) for link in agents.links], CODE_S)
    return files
