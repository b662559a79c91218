"""The commands that train: train, launch and resume."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.cli.flags import (
    Arguments,
    Data,
    DebugRank,
    Flags,
    Hostfile,
    Int,
    Interface,
    JobFlags,
    JsonAtEnd,
    Key,
    Model,
    PlaceFlags,
    Processes,
    Quiet,
    RunFlags,
    RunName,
    Settings,
    job_file,
    load,
    named_job,
    split_hosts,
)
from manyhands.cli.printing import print_config
from manyhands.core.errors import UserError
from manyhands.core.shown import show


def train(
    data: Data = None,
    model: Model = None,
    /,
    *arguments: Arguments,
    processes: Processes = None,
    job: JobFlags = JobFlags(),
    place: PlaceFlags = PlaceFlags(),
    run: RunFlags = RunFlags(),
) -> int:
    """Train a classifier.

    Every option of the job is also a flag, such as --train.momentum 0.8; --show-config lists all options.
    """
    values = job_or_script(data, model, arguments) | {"cluster.processes": processes}
    loaded = load(values, job, place, run, file=job_file(data), recipe=job.recipe)
    if run.show_config:
        return print_config(loaded)
    from manyhands.cli.training import run_job

    return run_job(loaded, run)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LaunchFlags(Flags):
    """The machines of a launch."""

    hosts: Annotated[
        str | None, Parameter(help="machines: n1,n2,n3; with processes: n1:4,n2:4; with a port: ssh://user@n1:31234")
    ] = None
    hostfile: Hostfile = None
    on: Annotated[
        str | None, Parameter(help="submit the job to a scheduler: slurm or kubernetes"), Key("cluster.on")
    ] = None  # fmt: skip
    interface: Interface = None
    relay: Annotated[
        bool | None,
        Parameter(negative="", help="relay between machines that can't log in to each other"),
        Key("cluster.relay"),
    ] = None
    detach: Annotated[
        bool | None,
        Parameter(negative="", help="keep training when this terminal closes or this machine goes down"),
        Key("cluster.detach"),
    ] = None
    sync_code: Annotated[
        bool | None,
        Parameter(negative="", help="copy the code in this folder to the other machines first"),
        Key("cluster.sync_code"),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LaunchRunFlags(RunFlags):
    """`RunFlags`, of which --dry-run shows more."""

    dry_run: Annotated[bool, Parameter(negative="", help="print what would be started or submitted, and exit")] = False


def launch(
    data: Data = None,
    model: Model = None,
    /,
    *arguments: Arguments,
    machines: LaunchFlags = LaunchFlags(),
    job: JobFlags = JobFlags(),
    run: LaunchRunFlags = LaunchRunFlags(),
) -> int:
    """Train on several machines, started and monitored from here over ssh; or submit the job to a scheduler."""
    values = job_or_script(data, model, arguments) | {"cluster.hosts": split_hosts(machines.hosts)}
    loaded = load(values, machines, job, run, file=job_file(data), recipe=job.recipe)
    if run.show_config:
        return print_config(loaded)
    cluster, script = loaded.job.cluster, loaded.job.run.script
    if cluster.on and script:
        wrong = f"a script of your own can't be submitted to {cluster.on}"
        hints = ("name the machines: --hosts n1,n2", "or start the script without manyhands: srun, torchrun")
        raise UserError(wrong, "--on", hints)
    if cluster.on:
        from manyhands.run.submit import submit

        show(submit(loaded.job, job_file(data), cluster.on, dry_run=run.dry_run))
        return 0
    if not cluster.hosts and not cluster.hostfile:
        hints = ("add --hosts n1,n2 or --hostfile FILE", "or --on slurm")
        raise UserError("no machines are named", "manyhands launch", hints)
    from manyhands.cli.training import run_job

    return run_job(loaded, run)


def job_or_script(data: str | None, model: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """The data and network to train, or the script of the user's to run, by dotted key.

    Raises:
        UserError: there are words that belong to nothing.
    """
    if data and data.endswith(".py"):
        return {"run.script": (data, *filter(None, (model,)), *arguments)}
    words = [word for word in (data, model, *arguments) if word and re.match(r"[A-Za-z_][\w.]*=", word)]
    if words and not any(Path(word).exists() for word in words):
        from manyhands.config.load import meant_key

        pairs = [word.split("=", 1) for word in words]
        flags = " ".join(f"--{meant_key(name) or name} {value}" for name, value in pairs)
        raise UserError("options are flags, not key=value", "command line", (f"write {flags}",))
    if arguments:
        hints = ("pass arguments only to a script of your own: manyhands train train.py -n 2 -- ARGUMENTS",)
        raise UserError(f'unexpected argument "{arguments[0]}"', "command line", hints)
    return named_job(data, model)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ResumeFlags(Flags):
    """What a resumed run does otherwise than before."""

    processes: Annotated[
        Processes, Parameter(help="processes on this machine; the number may differ from before")
    ] = None  # fmt: skip
    epochs: Annotated[
        Int | None, Parameter(help="number of epochs in all, to train longer than the job says"), Key("train.epochs")
    ] = None
    detach: Annotated[
        bool | None,
        Parameter(help="keep training without this terminal and machine; default: as at launch"),
        Key("cluster.detach"),
    ] = None
    debug_rank: DebugRank = None
    set_: Settings = None

    def job_values(self) -> dict[str, Any]:
        """As `Flags` has them; only the rank that this command names is debugged."""
        given = {key: value for key, value in super().job_values().items() if value is not None}
        return {"cluster.debug_rank": -1} | given


def resume(
    name: RunName, /, *, flags: ResumeFlags = ResumeFlags(), as_json: JsonAtEnd = False, quiet: Quiet = False
) -> int:
    """Resume a stopped or failed run at the exact next sample, on any number of processes."""
    from manyhands.cli.training import run_job
    from manyhands.core.folder import RunFolder
    from manyhands.core.registry import headed_here
    from manyhands.report.read import read_run
    from manyhands.run.find import find_reference
    from manyhands.run.own_code import announce_resumed
    from manyhands.run.train import already_running

    folder = RunFolder(find_reference(name))
    if headed_here(folder.path):
        raise already_running(folder)
    read_run(folder.path)
    values = {"run.out": str(folder.path), "checkpoint.resume": "auto"}
    loaded = load(values, flags, file=folder.job)
    announce_resumed(folder, loaded)
    return run_job(loaded, RunFlags(as_json=as_json, quiet=quiet), resume_hint=True)
