"""Launches a job on several machines: starts agents over ssh, checks the machines, starts the workers, and watches."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from manyhands.checkpoint.saved import saved_step
from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.assemble import assembled, prepare, refuse_doubles
from manyhands.cluster.agents.claim import run_id
from manyhands.cluster.agents.machines import Machines
from manyhands.cluster.agents.mirror import Receiver
from manyhands.cluster.agents.protocol import FilePiece
from manyhands.cluster.agents.ssh import copied_by
from manyhands.cluster.agents.worker_start import attach_notice
from manyhands.cluster.code_files import copied_code
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import call
from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.records import read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import COPY_S
from manyhands.report.screen import Screen
from manyhands.run.doctor import LISTENING, facts_wanted
from manyhands.run.folder import run_folder
from manyhands.run.join import join_listener
from manyhands.run.logs import reach_of, read_places
from manyhands.run.machines import Membership
from manyhands.run.outcome import Outcome, conclude, ends_noted, note_replaced, starts_and_stops
from manyhands.run.recovery import run_to_end
from manyhands.run.registry import remember_reach
from manyhands.run.script import shown
from manyhands.run.start import Starts, check_machines
from manyhands.run.train import check_names, watch_on

NOT_BEGUN = "stopping before training has begun"


def launch(
    job: Job, machines: Sequence[Machine], *, quiet: bool = False, begun: Callable[[Path], None] = lambda _run: None
) -> Outcome:
    """Trains on several machines, the first of which has rank 0.

    Args:
        job: what to do.
        machines: where to train.
        quiet: no progress on standard error.
        begun: called often with the run folder, once the run trains.

    Raises:
        ManyhandsError: a machine can't be used, or the run failed; the error describes the first cause.
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
            wanted, on_stop = facts_wanted(job), lambda: screen.say(NOT_BEGUN)
            with assembled(machines, job.cluster, folder.ranks, wanted, on_stop) as found, ExitStack() as stack:
                _require_enough(job, folder, found, screen)
                remember_reach(folder.path, reach_of(job.cluster))
                membership = stack.enter_context(closing(Membership(job, found, folder, screen.say)))
                starts = stack.enter_context(Starts(job, membership, folder, receiver, screen.say))
                _prepare(job, membership, starts, folder, screen)
                show_news = shown(job, folder, screen, quiet=quiet)
                hear = stack.enter_context(join_listener(folder.path, membership.add, screen.say))

                def on_tick() -> None:
                    show_news()
                    if membership.trained or job.run.script:
                        begun(folder.path)

                def regroups() -> bool:
                    hear()
                    membership.tick()
                    if starts.copy:
                        starts.copy.carry()
                    return membership.regroups()

                watch = replace(
                    watch_on(job, screen, on_tick),
                    on_file=_RecordKeeper(receiver, screen, found.running[0].name),
                    cut=starts.tunnels.ended,
                    regroups=regroups,
                )
                ending = run_to_end(job, folder, membership, starts.orders, watch, screen.say)
                if starts.copy:
                    starts.copy.finish()
                if ending.replaced:
                    note_replaced(folder, ending.replaced)
        return conclude(job, folder, ending, earlier)


def _require_enough(job: Job, folder: RunFolder, machines: Machines, screen: Screen) -> None:
    """Accepts that machines don't answer, if `--elastic` allows a run with a checkpoint to resume without them.

    Raises:
        RunError: one that is needed doesn't answer.
    """
    resumes = job.cluster.recovers and saved_step(folder) is not None and job.checkpoint.resume == "auto"
    if not (resumes and len(machines.running) >= max(1, job.cluster.machines_wanted.start)):
        machines.require_all()
    for machine in machines.waiting:
        if machine.problem:
            screen.say(f"{machine.problem.what}: continuing without this machine", "WARNING")
            machine.problem = None


class _RecordKeeper:
    """Writes the records that arrive; after a failure the run continues, and its records stay where they are made."""

    def __init__(self, receiver: Receiver, screen: Screen, source: str) -> None:
        self._receiver, self._screen, self._source, self._works = receiver, screen, source, True

    def __call__(self, piece: FilePiece) -> None:
        if not self._works:
            return
        try:
            self._receiver.take(piece)
        except (OSError, ValueError) as error:
            self._works = False
            what = f"the records of the run can no longer be written on this machine: {error}"
            self._screen.say(f"{what}; new records are on {self._source} only", "WARNING")


def _prepare(job: Job, membership: Membership, starts: Starts, folder: RunFolder, screen: Screen) -> None:
    """Prepares everything that the first start needs: addresses, devices, folders, code."""
    machines = membership.machines
    # Checks come first, so that a user's mistake leaves no folders on other machines.
    addresses = check_machines(job, screen.say, machines)
    prepare(machines, job.cluster)
    if not addresses:
        _refuse_devices(job, machines)
    starts.set_addresses(addresses)
    starts.open_folders(output=bool(job.run.script))
    _refuse_another_run(job, folder, machines)
    if job.checkpoint.resume == "auto" and not job.run.script:
        starts.resume_from_newest()
    _refuse_lost_checkpoints(job, folder, machines)
    if job.cluster.sync_code:
        membership.code = _share_code(machines, screen)


def _refuse_devices(job: Job, machines: Machines) -> None:
    """Raises UserError if the collectives would not use gloo, the only backend that works through ssh."""
    others = sorted({machine.device for machine in machines.running} - {"cpu"})
    if others and job.cluster.backend != "gloo":
        what = f"only ssh connects these machines, and collectives of {', '.join(others)} devices can't go through ssh"
        hints = (
            "use --backend gloo, which copies through CPU memory",
            "or --device cpu",
            "or put the machines into one network",
            "or name a trusted network with public addresses: --interface NAME",
        )
        raise UserError(what, "cluster.backend", hints)


def _refuse_another_run(job: Job, folder: RunFolder, machines: Machines) -> None:
    """Refuses a machine whose folder of this name is in use, or has checkpoints of another run.

    Raises:
        UserError: one has; its checkpoints would be taken for this run's.
    """
    resumes = job.run.out and job.checkpoint.resume != "never"
    for machine in machines.running:
        name, answer, place = machine.name, machine.run_folder, machine.run_folder.folder
        if answer.taken:
            hints = ("wait until the run ends, or stop it where it was launched", "or choose another --out runs/NAME")
            raise UserError(f"a run is active in {name}:{place}", "--out", hints)
        if machine.agent.here or answer.shared or not answer.checkpoints:
            continue
        found = answer.run
        if found and found != run_id(folder):
            copy = copied_by(machine.spec, place, str(folder.path))
            hints = ("choose another --out runs/NAME", f"or, to resume that run, copy it to a new folder: {copy}")
            raise UserError(
                f"the folder {place} on {name} belongs to a different run than {folder.path}", "--out", hints
            )
        if not found and not resumes:
            hints = (
                "choose another --out runs/NAME",
                "or resume that run: name its folder with --out, and add --resume auto",
            )
            raise UserError(f"the folder {place} on {name} already contains a run", "--out", hints)


def _refuse_lost_checkpoints(job: Job, folder: RunFolder, machines: Machines) -> None:
    """Refuses to restart a saved run from scratch because the first machine has no checkpoint.

    Raises:
        UserError: there is no checkpoint where rank 0 looks for one.
    """
    saved = [line.get("step") for line in read_lines(folder.events) if line.get("kind") == "saved"]
    first = machines.running[0]
    if saved and job.checkpoint.resume == "auto" and not first.run_folder.checkpoints:
        had = next((place.host for place in read_places(folder)), "")
        raise UserError(
            f"{first.name} has no checkpoint of {folder.path}; the last checkpoint is of step {saved[-1]}"
            + (f" on {had}" if had else ""),
            f"{first.name}:{first.run_folder.folder}/checkpoints",
            ("list the machine with the checkpoint first", "or copy its run folder to rank 0", "or use a new --out"),
        )


def _share_code(machines: Machines, screen: Screen) -> dict[str, str]:
    """Copies the code of this folder to every other machine; agents, and so their workers, change to that folder."""
    files, left = copied_code(Path.cwd())
    for line in left:
        screen.say(line)
    others = [machine for machine in machines.running if not machine.agent.here]
    machines.ask(dict.fromkeys(others, call(Agent.take_code, files)), COPY_S)
    return files
