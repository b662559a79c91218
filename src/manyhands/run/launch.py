"""Launches a job on several machines: starts agents over ssh, checks the machines, starts the workers, and watches."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from manyhands.checkpoint.saved import saved_step
from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.assemble import AgentLinks, assembled, prepare, refuse_doubles
from manyhands.cluster.agents.claim import run_id
from manyhands.cluster.agents.code import code_files
from manyhands.cluster.agents.debugger import attach_notice
from manyhands.cluster.agents.mirror import Receiver
from manyhands.cluster.agents.protocol import FilePiece, RunOpened
from manyhands.cluster.agents.ssh import copied_by
from manyhands.cluster.agents.store_tunnel import StoreTunnel
from manyhands.cluster.agents.supervise import supervise_once
from manyhands.cluster.doctor.findings import DoctorFinding, Facts, examine
from manyhands.cluster.hosts.inventory import LOOPBACK, Address, Machine
from manyhands.cluster.messages import call
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_DOCTOR, RunError, UserError
from manyhands.core.records import read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import COPY_S
from manyhands.report.screen import Screen
from manyhands.run.doctor import LISTENING, facts_wanted, known_of, public_addresses, survey_agents
from manyhands.run.folder import run_folder
from manyhands.run.join import join_listener
from manyhands.run.logs import reach_of, read_places
from manyhands.run.on_machines import AgentMachines
from manyhands.run.outcome import Outcome, conclude, ends_noted, note_replaced, starts_and_stops
from manyhands.run.pending import PendingMachines, RefusedError
from manyhands.run.recovery import Recovery
from manyhands.run.registry import remember_reach
from manyhands.run.script import shown
from manyhands.run.train import check_names, watch_on

NOT_BEGUN = "stopping before training has begun"
# Checks of the doctor whose findings may have changed by the next minute.
MOMENTARY = {"cpu", "jobs"}


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
            reached = assembled(machines, job.cluster, folder.ranks, facts_wanted(job), lambda: screen.say(NOT_BEGUN))
            with ExitStack() as stack, reached as agents, StoreTunnel(job.cluster) as way:
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
                    on_file=_RecordKeeper(receiver, screen, agents.links[0].machine.name),
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
    """Returns the machines that don't answer, if `--elastic` allows a run with a checkpoint to resume without them.

    Raises:
        RunError: one that is needed doesn't answer.
    """
    there = [link.machine for link in agents.links]
    resumes = job.cluster.recovers and saved_step(folder) is not None and job.checkpoint.resume == "auto"
    if not (resumes and there and len(there) >= job.cluster.machines_wanted.start):
        agents.require_all()
    for contact in agents.contacts.values():
        screen.say(f"{contact.what}: continuing without this machine", "WARNING")
    agents.contacts.clear()
    return [machine for machine in machines if machine not in there]


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
            what = f"the records of the run can't be written here any more: {error}"
            self._screen.say(f"{what}; new records are on {self._source} only", "WARNING")


def check_machines(job: Job, say: Callable[[str, str], object], agents: AgentLinks) -> list[Address]:
    """Runs the doctor's checks without measurements, and returns the addresses at which the machines reach each other.

    Returns no addresses if the machines are to connect through ssh, or only ssh reaches them.

    Raises:
        RunError: training would fail; the error has the doctor's findings.
    """
    if len(agents.links) == 1:
        return [Address("", LOOPBACK)]
    survey = survey_agents(job, agents, [link.machine for link in agents.links], measure=False)
    found = examine(survey)
    failures = _failures(found)
    apart = bool(failures) and all(finding.check == "reach" for finding in failures)
    public = public_addresses(survey.chosen)
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
        if finding.severity == "warn" and finding.check not in MOMENTARY:
            say(finding.what, "WARNING")
    return [] if through_ssh else [Address(*survey.chosen[link.machine.name]) for link in agents.links]


def judge(job: Job, agents: AgentLinks, machine: Machine, facts: Facts) -> None:
    """Checks the facts of a machine that joins against those of the machines of the run.

    Raises:
        RefusedError: training with it would fail.
    """
    known = {link.machine.name: own for link, own in zip(agents.links, agents.facts, strict=True) if not link.closed}
    machines = [*(link.machine for link in agents.links if not link.closed), machine]
    if failures := _failures(examine(known_of(job, machines, {**known, machine.name: facts}))):
        raise RefusedError(failures[0].what, machine.name, failures[0].hints)


def _failures(found: list[DoctorFinding]) -> list[DoctorFinding]:
    return [finding for finding in found if finding.severity == "fail"]


def _ready(
    job: Job,
    agents: AgentLinks,
    folder: RunFolder,
    receiver: Receiver,
    screen: Screen,
    pending: PendingMachines,
    absent: Sequence[Machine],
) -> AgentMachines:
    """Prepares everything that the workers need: addresses, sizes, folders, code."""
    addresses = check_machines(job, screen.say, agents)
    # Checks come first, so that a user's mistake leaves no folders on other machines.
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
    """Raises UserError if the collectives would not use gloo, the only backend that works through ssh."""
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
    """Refuses a machine whose folder of this name is in use, or has checkpoints of another run.

    Raises:
        UserError: one has; its checkpoints would be taken for this run's.
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
            hints = (
                "choose another --out runs/NAME",
                "or resume that run: name its folder with --out, and add --resume auto",
            )
            raise UserError(f"{name} already holds a run in {place}", "--out", hints)


def _refuse_lost_checkpoints(job: Job, folder: RunFolder, agents: AgentLinks, opened: RunOpened) -> None:
    """Refuses to restart a saved run from scratch because the first machine has no checkpoint.

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
    """Copies the code of this folder to every other machine; agents, and so their workers, change to that folder."""
    files, left = code_files(Path.cwd())
    for line in left:
        screen.say(line)
    agents.ask([call(Agent.clock) if link.here else call(Agent.take_code, files) for link in agents.links], COPY_S)
    return files
