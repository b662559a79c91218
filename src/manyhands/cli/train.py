"""The commands that train: train, launch and resume."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyhands.cli.flags import (
    Arguments,
    Data,
    JobFlags,
    LaunchFlags,
    Model,
    PlaceFlags,
    Processes,
    ResumeFlags,
    RunFlags,
    RunName,
    load,
    named,
)
from manyhands.cli.printing import print_config
from manyhands.core.errors import UserError
from manyhands.core.terminal import show


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
    values, file = job_or_script(data, model, arguments)
    loaded = load(values | {"cluster.processes": processes}, job, place, run, file=file, recipe=job.recipe)
    if run.show_config:
        return print_config(loaded)
    from manyhands.cli.training import run_job

    return run_job(loaded, run)


def launch(
    data: Data = None,
    model: Model = None,
    /,
    *arguments: Arguments,
    machines: LaunchFlags = LaunchFlags(),
    job: JobFlags = JobFlags(),
    run: RunFlags = RunFlags(),
) -> int:
    """Train on several machines, started and monitored from here over ssh; or submit the job to a scheduler."""
    values, file = job_or_script(data, model, arguments)
    loaded = load(values, machines, job, run, file=file, recipe=job.recipe)
    if run.show_config:
        return print_config(loaded)
    cluster, script = loaded.job.cluster, loaded.job.run.script
    if cluster.on and script:
        wrong = f"a script of your own can't be submitted to {cluster.on}"
        hints = ("name the machines: --hosts n1,n2", "or start the script without manyhands: srun, torchrun")
        raise UserError(wrong, "--on", hints)
    if cluster.on:
        from manyhands.run.submit import submit

        show(submit(loaded.job, file, cluster.on, dry_run=run.dry_run))
        return 0
    if not cluster.hosts and not cluster.hostfile:
        hints = ("add --hosts n1,n2 or --hostfile FILE", "or --on slurm")
        raise UserError("no machines are named", "manyhands launch", hints)
    from manyhands.cli.training import run_job

    return run_job(loaded, run)


def job_or_script(data: str | None, model: str | None, arguments: Sequence[str]) -> tuple[dict[str, Any], Path | None]:
    """The data and network to train, or the user's script to run, by dotted key; and the job.toml, if one is named.

    Raises:
        UserError: there are words that belong to nothing.
    """
    if data and data.endswith(".py"):
        return {"run.script": (data, *filter(None, (model,)), *arguments)}, None
    words = [word for word in (data, model, *arguments) if word and re.match(r"[A-Za-z_][\w.]*=", word)]
    if words and not any(Path(word).exists() for word in words):
        from manyhands.config.load import meant_key

        pairs = [word.split("=", 1) for word in words]
        flags = " ".join(f"--{meant_key(name) or name} {value}" for name, value in pairs)
        raise UserError("options are flags, not key=value", "command line", (f"write {flags}",))
    if arguments:
        hints = ("pass arguments only to a script of your own: manyhands train train.py -n 2 -- ARGUMENTS",)
        raise UserError(f'unexpected argument "{arguments[0]}"', "command line", hints)
    return named(data, model)


def resume(name: RunName, /, *, flags: ResumeFlags = ResumeFlags(), run: RunFlags = RunFlags()) -> int:
    """Resume a stopped or failed run at the exact next sample, on any number of processes."""
    from manyhands.run.resume import load_resumed

    values = {"cluster.debug_rank": -1}
    for group in (flags, run):
        values |= {key: value for key, value in group.job_values().items() if value is not None}
    loaded = load_resumed(name, values)
    if run.show_config:
        return print_config(loaded)
    from manyhands.cli.training import run_job

    return run_job(loaded, run, resume_hint=True)
