"""manyhands train."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.cli.flags import (
    Arguments,
    AsJson,
    Backend,
    Batch,
    Compile,
    Data,
    DataDir,
    Device,
    DryRun,
    Epochs,
    Lr,
    Mesh,
    Model,
    Out,
    Parallel,
    Pin,
    Pretrained,
    Processes,
    Quiet,
    Resume,
    Seed,
    Settings,
    ShowConfig,
    Sync,
)
from manyhands.cluster.descriptions.inventory import Machine, Meeting
from manyhands.config.job import ClusterOptions
from manyhands.config.load import LoadedJob, known_keys, load_job, parse_value
from manyhands.core.errors import UserError
from manyhands.core.shown import as_json as line_of_json
from manyhands.core.shown import show, show_json
from manyhands.parallel.options import MODE_OF_PLANS


def train(  # noqa: PLR0913 - one argument for each flag
    data: Data = None,
    model: Model = None,
    /,
    *arguments: Arguments,
    processes: Processes = None,
    epochs: Epochs = None,
    batch: Batch = None,
    lr: Lr = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = None,
    data_dir: DataDir = None,
    parallel: Parallel = None,
    mesh: Mesh = None,
    pin: Pin = None,
    sync: Sync = None,
    init: Annotated[str | None, Parameter(help="meet other processes: tcp://HOST:PORT, file:///PATH, env://")] = None,
    world_size: Annotated[int | None, Parameter(help="with --init: processes over all machines")] = None,
    rank: Annotated[int | None, Parameter(help="with --init: this process, counted from 0")] = None,
    rank_table: Annotated[str | None, Parameter(help="Ascend's rank table, with this machine in it")] = None,
    cluster: Annotated[str | None, Parameter(help="a description of the cluster, with this machine in it")] = None,
    backend: Backend = None,
    device: Device = None,
    pretrained: Pretrained = None,
    compile_: Compile = None,
    set_: Settings = None,
    show_config: ShowConfig = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Train a classifier.

    Every option of the job can be given by its path, such as --train.momentum 0.8; --show-config lists them.
    """
    flags: dict[str, Any] = {
        **what(data, model, arguments),
        "cluster.processes": processes,
        "train.epochs": epochs,
        "train.batch": batch,
        "train.lr": lr,
        "train.seed": seed,
        "run.out": out,
        "checkpoint.resume": resume,
        "data.dir": data_dir,
        "parallel.mode": parallel or (MODE_OF_PLANS if pin else None),
        "parallel.mesh": mesh,
        "parallel.pin": tuple(pin) if pin else None,
        "sync.method": sync,
        "cluster.init": init,
        "cluster.world_size": world_size,
        "cluster.rank": rank,
        "cluster.rank_table": rank_table,
        "cluster.file": cluster,
        "cluster.backend": backend,
        "cluster.device": device,
        "model.pretrained": pretrained,
        "train.compile": compile_,
    }
    job_file = Path(data) if data and data.endswith(".toml") else None
    loaded = load_job({**flags, **settings(set_ or [])}, file=job_file)
    if show_config:
        print_config(loaded)
        return 0
    return run(loaded, dry_run=dry_run, as_json=as_json, quiet=quiet)


def what(data: str | None, model: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Which data and network are to be trained, or which script of the user's is to run, by dotted key.

    Raises:
        UserError: there are words that belong to nothing.
    """
    if data and data.endswith(".py"):
        return {"run.script": (data, *filter(None, (model,)), *arguments)}
    if arguments:
        mend = ("arguments are for a script of your own: manyhands train train.py -n 2 -- ARGUMENTS",)
        raise UserError(f'"{arguments[0]}" is one word too many', "command line", mend)
    return {"model.name": model, "data.name": None if data and data.endswith(".toml") else data}


def settings(words: list[str]) -> dict[str, Any]:
    """`key=value` words as values by dotted key.

    Raises:
        UserError: a word has no "=".
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f'"{word}" is not key=value', "--set", ("such as --set train.lr=0.05",))
        found[key.strip()] = parse_value(value)
    return found


def run(
    loaded: LoadedJob,
    *,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    meeting: Meeting | None = None,
    to_go_on: bool = False,
) -> int:
    """Trains and prints the result.

    Args:
        loaded: the job.
        dry_run: only say what would be done.
        as_json: end with an object for programs.
        quiet: no progress.
        meeting: this machine among others that each start their own processes.
        to_go_on: a finished run may go on under other options than it was trained by.
    """
    if loaded.job.run.script:
        return _run_script(loaded, dry_run=dry_run, as_json=as_json, quiet=quiet, to_go_on=to_go_on)
    from manyhands.report.changes import refuse_changes

    refuse_changes(loaded, to_go_on=to_go_on)
    if dry_run:
        from manyhands.run.load import load_worker

        load_worker("check").check_names(loaded.job)
        lines = describe(loaded)
        show(line_of_json({"dry_run": lines}) if as_json else lines)
        return 0
    from manyhands.report.summary import result_lines, result_object
    from manyhands.run.launch import start

    outcome = start(loaded.job, quiet=quiet, meeting=meeting)
    if not outcome.is_main:
        return outcome.exit_code
    found = outcome.read()
    if not quiet or not as_json:
        show(result_lines(found), sys.stderr if as_json else sys.stdout)
    if as_json:
        show_json(result_object(found))
    return outcome.exit_code


def _run_script(loaded: LoadedJob, *, dry_run: bool, as_json: bool, quiet: bool, to_go_on: bool) -> int:
    """Runs a training script of the user's, whose own output is what there is to see."""
    from manyhands.run.launch import start
    from manyhands.run.script import check_script, result_lines

    script = loaded.job.run.script
    if to_go_on:
        mend = (f"start it again: manyhands train {shlex.join([script[0], '--', *script[1:]])}",)
        raise UserError(f"{script[0]} saves by itself, if at all", "manyhands resume", mend)
    check_script(loaded)
    if dry_run:
        lines = describe(loaded)
        show(line_of_json({"dry_run": lines}) if as_json else lines)
        return 0
    outcome = start(loaded.job, quiet=quiet)
    if outcome.is_main and not as_json:
        show(result_lines(outcome.folder, loaded.job), sys.stderr)
    elif outcome.is_main:
        show_json({"run": str(outcome.folder.path), "status": outcome.status, "exit_code": outcome.exit_code})
    return outcome.exit_code


def describe(loaded: LoadedJob) -> list[str]:
    """What a run would do, as far as it can be told without the data."""
    job = loaded.job
    from manyhands.cluster.descriptions.machines import machines_of

    machines = machines_of(job.cluster)
    who, starts = _on_machines(machines, job.cluster) if machines else (_taking_part(job.cluster), [])
    if job.run.script:
        into = f"into {job.run.out or f'runs/<date>-{Path(job.run.script[0]).stem}-script'}"
        return [f"would run {shlex.join(job.run.script)}", f"as {who}", into, *starts]
    return [
        f"would train {job.model.name} on {job.data.name}: {job.train.epochs} epochs, {job.train.batch} samples per "
        f"update, {job.train.optimizer}" + (f" with a peak rate of {job.train.lr}" if job.train.built_in else ""),
        f"as {who}",
        f"into {job.run.out or 'runs/<date>-<data>-<model>'}",
        *starts,
    ]


def _on_machines(machines: Sequence[Machine], options: ClusterOptions) -> tuple[str, list[str]]:
    """Who takes part, and the command that starts the agent on each other machine."""
    from manyhands.cluster.agents.ssh import agent_script, port_words, ssh_words
    from manyhands.cluster.descriptions.own import is_here

    names = ", ".join(f"{machine.name} ({machine.slots})" if machine.slots else machine.name for machine in machines)
    ssh = shlex.join(ssh_words(options))

    def start(machine: Machine) -> str:
        return (
            "this machine" if is_here(machine) else " ".join([ssh, *port_words(machine), "--", machine.host, "SCRIPT"])
        )

    starts = [f"{machine.name}: {start(machine)}" for machine in machines]
    script = agent_script(options, Path.cwd()).splitlines()
    return f"processes on {names}", [*starts, "SCRIPT, by sh:", *(f"  {line}" for line in script)]


def _taking_part(options: ClusterOptions) -> str:
    from manyhands.cluster.rendezvous import participate

    place = participate(options)
    count = place.processes
    who = f"{count} process{'es' if count > 1 else ''}" if count else "one process, or one for each accelerator"
    if place.meeting:
        who += f" on machine {place.meeting.machine} of {len(place.meeting.sizes)}, by {place.origins['size']}"
    elif place.membership:
        found = place.membership
        by = f"meeting at {found.init}" if found.started_by == "--init" else f"by {found.started_by}"
        who = f"rank {found.rank} of {found.size}, {by}"
    else:
        who += " on this machine"
    return who


def print_config(loaded: LoadedJob) -> None:
    """Every value of the job and where it came from, as TOML with comments."""
    values = loaded.job.model_dump(mode="json")
    section = ""
    for key in known_keys():
        name, _, option = key.partition(".")
        if name != section:
            show(f"{'' if not section else chr(10)}[{name}]")
            section = name
        line = f"{option} = {line_of_json(values[name][option])}"
        show(f"{line:<40} # {loaded.origins.get(key, 'default')}")
