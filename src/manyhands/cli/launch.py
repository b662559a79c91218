"""manyhands launch."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.cli.train import MODEL, NAME, print_config, run, settings
from manyhands.config.load import load_job
from manyhands.core.errors import UserError


def launch(  # noqa: PLR0913 - one argument for each flag
    data: Annotated[str | None, NAME] = None,
    model: Annotated[str | None, MODEL] = None,
    /,
    *,
    hosts: Annotated[str | None, Parameter(help="n1,n2,n3, or with processes: n1:4,n2:4")] = None,
    hostfile: Annotated[str | None, Parameter(help="a file of hosts: n1 slots=4 a line")] = None,
    on: Annotated[str | None, Parameter(help="slurm or kubernetes: hand the job over instead")] = None,
    interface: Annotated[str | None, Parameter(help="network interface between the machines; found by trying")] = None,
    sync_code: Annotated[
        bool | None, Parameter(negative="", help="copy this folder's code to the other machines first")
    ] = None,
    out: Annotated[str | None, Parameter(help="run folder; an unfinished run there goes on")] = None,
    resume: Annotated[str | None, Parameter(help="auto, never, or a run, checkpoint or .pth.tar to go on from")] = None,
    epochs: Annotated[int | None, Parameter(help="passes over the training data")] = None,
    batch: Annotated[int | None, Parameter(help="samples per update, over all processes")] = None,
    set_: Annotated[
        list[str] | None, Parameter(name="--set", negative="", help="any option: train.momentum=0.8")
    ] = None,
    show_config: Annotated[
        bool, Parameter(negative="", help="print every value and where it came from; start nothing")
    ] = False,
    dry_run: Annotated[
        bool, Parameter(negative="", help="print what would be started, or handed over; start nothing")
    ] = False,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="last line on stdout: one JSON object")
    ] = False,
    quiet: Annotated[bool, Parameter(name=["-q", "--quiet"], negative="", help="no progress")] = False,
) -> int:
    """Train on several machines, started and watched from here over ssh; or hand the job to a scheduler."""
    job_file = Path(data) if data and data.endswith(".toml") else None
    flags: dict[str, Any] = {
        "data.name": None if job_file else data,
        "model.name": model,
        "cluster.hosts": hosts.split(",") if hosts else None,
        "cluster.hostfile": hostfile,
        "cluster.on": on,
        "cluster.interface": interface,
        "cluster.sync_code": sync_code,
        "run.out": out,
        "checkpoint.resume": resume,
        "train.epochs": epochs,
        "train.batch": batch,
    }
    loaded = load_job({**flags, **settings(set_ or [])}, file=job_file)
    if show_config:
        print_config(loaded)
        return 0
    if loaded.job.cluster.on:
        from manyhands.run.submit import submit

        print(submit(loaded.job, job_file, loaded.job.cluster.on, dry_run=dry_run))
        return 0
    if not loaded.job.cluster.hosts and not loaded.job.cluster.hostfile:
        raise UserError(
            "no machines are named", "manyhands launch", ("--hosts n1,n2", "or --hostfile FILE", "or --on slurm")
        )
    return run(loaded, dry_run=dry_run, as_json=as_json, quiet=quiet)
