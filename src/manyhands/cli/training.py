"""Trains a loaded job and prints the result, or describes the run for --dry-run."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from manyhands.cli.flags import RunFlags
from manyhands.cli.printing import print_answer
from manyhands.cluster.agents import early, ssh
from manyhands.cluster.hosts import inventory, this_process
from manyhands.config.job import ClusterOptions, Job
from manyhands.config.load import LoadedJob
from manyhands.core.errors import UserError
from manyhands.core.terminal import say, show, show_json
from manyhands.report import changes, summary
from manyhands.run.folder import announce_ssh_command, new_run_path
from manyhands.run.outcome import Outcome
from manyhands.run.train import check_names, check_script, launch_decision, refuse_missing, train


def run_job(
    loaded: LoadedJob, flags: RunFlags, *, rendezvous: inventory.Rendezvous | None = None, resume_hint: bool = False
) -> int:
    """Trains and prints the result, or describes the run under --dry-run; returns the exit code.

    `rendezvous` connects machines that each start their own processes. `resume_hint`: the user asked to resume the run.
    """
    job, script = loaded.job, loaded.job.run.script
    if script and resume_hint:
        hints = (f"start the script again: manyhands train {shlex.join([script[0], '--', *script[1:]])}",)
        raise UserError(f"{script[0]} is a script of your own, which manyhands can't resume", "manyhands resume", hints)
    if script:
        check_script(loaded)
    else:
        changes.refuse_changes(loaded, resume_hint=resume_hint)
    if flags.dry_run:
        lines = describe(loaded)
        print_answer({"dry_run": lines}, lines, json=flags.as_json)
        return 0
    machines = tuple(this_process.machines_of(job.cluster))
    # srun or a similar launcher may already have set this process's rank.
    if machines and not launch_decision(job).process_info:
        announce_ssh_command(loaded)
        early.kill_unused_agent()  # this machine may not take part, and a detached launcher is another process
        from manyhands.run.launch import DetachedLauncher, launch

        background = DetachedLauncher() if job.cluster.detach else None
        if background and background.child_pid:
            return background.wait(as_json=flags.as_json)
        outcome = launch(job, machines, quiet=flags.quiet, on_train=background.leave if background else lambda _: None)
    else:
        outcome = train(job, quiet=flags.quiet, rendezvous=rendezvous)
    if outcome.is_main:
        with suppress(BrokenPipeError):  # the reader has ended; the exit code is the run's
            _print_result(outcome, job, as_json=flags.as_json, quiet=flags.quiet)
    return outcome.exit_code


def _print_result(outcome: Outcome, job: Job, *, as_json: bool, quiet: bool) -> None:
    """Prints the result of a run. For a user's script, prints only the run folder and the command to see its output."""
    if job.run.script and as_json:
        show_json({"run": str(outcome.folder.path), "status": outcome.status, "exit_code": outcome.exit_code})
    elif job.run.script:
        path = outcome.folder.path
        logs = f"logs   manyhands logs {shlex.quote(str(path))}"
        show([f"{job.run.script[0]} finished", f"run    {path}", logs], sys.stderr)
    else:
        found = outcome.read()
        if not quiet or not as_json:
            show(summary.result_lines(found), sys.stderr if as_json else sys.stdout)
        if as_json:
            show_json(summary.result_object(found))


def describe(loaded: LoadedJob) -> list[str]:
    """Returns lines for --dry-run; starts no process and reads no picture. Raises UserError for an invalid job."""
    job = loaded.job
    machines = this_process.machines_of(job.cluster)
    if job.run.script:
        work = [f"would run {shlex.join(job.run.script)}"]
    else:
        (check_names if machines else refuse_missing)(job)  # other machines may have files that this one doesn't
        from manyhands.worker.launcher import describe_data

        data, too_large = describe_data(job)
        if too_large:
            say(too_large)
        rate = f" with a peak lr of {job.train.lr}" if job.train.built_in else ""
        epochs = f"{job.train.epochs} epochs, {job.train.batch} samples per update, {job.train.optimizer}{rate}"
        work = [f"would train {job.model.name} on {job.data.name}: {epochs}", *([f"with {data}"] if data else [])]
    processes, starts = _describe_machines(machines, job.cluster) if machines else (_describe_local_processes(job), [])
    return [*work, f"as {processes}", f"into {new_run_path(job)}", *starts]


def _describe_machines(machines: Sequence[inventory.Machine], options: ClusterOptions) -> tuple[str, list[str]]:
    """Returns (description of the processes, lines with the commands that start an agent on each machine)."""
    names = ", ".join(f"{machine.name} ({machine.slots})" if machine.slots else machine.name for machine in machines)
    starts: list[str] = []
    for machine in machines:
        words = [shlex.join(ssh.ssh_arguments(options)), *ssh.ssh_port_option(machine), "--", machine.host, "SCRIPT"]
        starts.append(f"{machine.name}: {'this machine' if this_process.is_this_machine(machine) else ' '.join(words)}")
    script = ssh.agent_script(options, Path.cwd()).splitlines()
    return f"processes on {names}", [*starts, "SCRIPT, run by sh:", *(f"  {line}" for line in script)]


def _describe_local_processes(job: Job) -> str:
    place = launch_decision(job)
    if found := place.process_info:
        by = f"rendezvous at {found.init}" if found.started_by == "--init" else f"by {found.started_by}"
        return f"rank {found.rank} of {found.size}, {by}"
    count = place.processes
    if not count and not job.run.script:
        from manyhands.worker.launcher import default_processes

        count = default_processes(job)
    processes = f"{count} process{'es' if count > 1 else ''}" if count else "one process, or one per accelerator"
    if not place.rendezvous:
        return f"{processes} on this machine"
    size = len(place.rendezvous.sizes)
    return f"{processes} on machine {place.rendezvous.machine} of {size}, by {place.origins['size']}"
