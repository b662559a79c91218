"""Trains by a loaded job and prints the result, or what would be done: what train, launch, imagenet and resume share.

It imports what a run needs; a command imports it once it has a job, since a page of help needs nothing of that.
"""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from manyhands.cluster.agents.early import end_early
from manyhands.cluster.agents.ssh import agent_script, port_words, ssh_words
from manyhands.cluster.hosts.inventory import Machine, Rendezvous
from manyhands.cluster.hosts.machines import machines_of
from manyhands.cluster.hosts.this_process import is_here
from manyhands.config.job import ClusterOptions, Job
from manyhands.config.load import LoadedJob
from manyhands.core.errors import UserError
from manyhands.core.terminal import say, show, show_json
from manyhands.report.changes import refuse_changes
from manyhands.report.summary import result_lines, result_object
from manyhands.run.folder import folder_to_be
from manyhands.run.outcome import Outcome
from manyhands.run.resume import announce_reach
from manyhands.run.script import check_script
from manyhands.run.script import result_lines as script_lines
from manyhands.run.train import check_names, place_of, train


def run(
    loaded: LoadedJob,
    *,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    rendezvous: Rendezvous | None = None,
    resume_hint: bool = False,
) -> int:
    """Trains and prints the result.

    Args:
        loaded: the job.
        dry_run: only say what would be done.
        as_json: end with an object for programs.
        quiet: no progress.
        rendezvous: this machine among others that each start their own processes.
        resume_hint: a finished run may go on under other options than it was trained by.
    """
    job = loaded.job
    if job.run.script:
        _check_script(loaded, resume_hint=resume_hint)
    else:
        refuse_changes(loaded, resume_hint=resume_hint)
    if dry_run:
        lines = describe(loaded)
        if as_json:
            show_json({"dry_run": lines})
        else:
            show(lines)
        return 0
    if machines := _machines_to_reach(job):
        announce_reach(loaded)
        end_early()  # this machine may take no part, and a head that is detached is another process
        from manyhands.run.background import Background
        from manyhands.run.launch import launch

        background = Background() if job.cluster.detach else None
        if background and background.elsewhere:
            return background.wait(as_json=as_json)
        outcome = launch(job, machines, quiet=quiet, begun=background.leave if background else lambda _run: None)
    else:
        outcome = train(job, quiet=quiet, rendezvous=rendezvous)
    if outcome.is_main:
        with suppress(BrokenPipeError):  # nobody reads the result, and the exit code is the run's own
            _print_result(outcome, job, as_json=as_json, quiet=quiet)
    return outcome.exit_code


def _machines_to_reach(job: Job) -> tuple[Machine, ...]:
    """The machines that a job names; none where srun or the like has given this process its place already."""
    machines = tuple(machines_of(job.cluster))
    return () if machines and place_of(job).process_info else machines


def _check_script(loaded: LoadedJob, *, resume_hint: bool) -> None:
    script = loaded.job.run.script
    if resume_hint:
        hints = (f"start the script again: manyhands train {shlex.join([script[0], '--', *script[1:]])}",)
        raise UserError(f"{script[0]} is a script of your own, which manyhands can't resume", "manyhands resume", hints)
    check_script(loaded)


def _print_result(outcome: Outcome, job: Job, *, as_json: bool, quiet: bool) -> None:
    """The result; of a script of the user's its own output is what there is to see."""
    if job.run.script and as_json:
        show_json({"run": str(outcome.folder.path), "status": outcome.status, "exit_code": outcome.exit_code})
    elif job.run.script:
        show(script_lines(outcome.folder, job), sys.stderr)
    else:
        found = outcome.read()
        if not quiet or not as_json:
            show(result_lines(found), sys.stderr if as_json else sys.stdout)
        if as_json:
            show_json(result_object(found))


def describe(loaded: LoadedJob) -> list[str]:
    """What a run would do, as far as it can be told without starting a process or reading a picture.

    Raises:
        UserError: a name is unknown, or the data can't be trained on.
    """
    job = loaded.job
    data, too_large = "", ""
    if not job.run.script:
        check_names(job)
        from manyhands.worker.check import describe_data

        data, too_large = describe_data(job)
    if too_large:
        say(too_large)
    machines = machines_of(job.cluster)
    who, starts = _on_machines(machines, job.cluster) if machines else (_taking_part(job), [])
    into = f"into {folder_to_be(job)}"
    if job.run.script:
        return [f"would run {shlex.join(job.run.script)}", f"as {who}", into, *starts]
    return [
        f"would train {job.model.name} on {job.data.name}: {job.train.epochs} epochs, {job.train.batch} samples per "
        f"update, {job.train.optimizer}" + (f" with a peak lr of {job.train.lr}" if job.train.built_in else ""),
        *([f"with {data}"] if data else []),
        f"as {who}",
        into,
        *starts,
    ]


def _on_machines(machines: Sequence[Machine], options: ClusterOptions) -> tuple[str, list[str]]:
    """Who takes part, and the command that starts the agent on each other machine."""
    names = ", ".join(f"{machine.name} ({machine.slots})" if machine.slots else machine.name for machine in machines)
    ssh = shlex.join(ssh_words(options))

    def start(machine: Machine) -> str:
        return (
            "this machine" if is_here(machine) else " ".join([ssh, *port_words(machine), "--", machine.host, "SCRIPT"])
        )

    starts = [f"{machine.name}: {start(machine)}" for machine in machines]
    script = agent_script(options, Path.cwd()).splitlines()
    return f"processes on {names}", [*starts, "SCRIPT, run by sh:", *(f"  {line}" for line in script)]


def _taking_part(job: Job) -> str:
    place = place_of(job)
    count = place.processes
    if not (count or place.process_info or job.run.script):
        from manyhands.worker.check import processes_here

        count = processes_here(job)
    who = f"{count} process{'es' if count > 1 else ''}" if count else "one process, or one per accelerator"
    if place.rendezvous:
        who += f" on machine {place.rendezvous.machine} of {len(place.rendezvous.sizes)}, by {place.origins['size']}"
    elif place.process_info:
        found = place.process_info
        by = f"rendezvous at {found.init}" if found.started_by == "--init" else f"by {found.started_by}"
        who = f"rank {found.rank} of {found.size}, {by}"
    else:
        who += " on this machine"
    return who
