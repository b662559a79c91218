"""manyhands launch."""

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
    DebugRank,
    Device,
    Elastic,
    Epochs,
    Hostfile,
    Interface,
    Lr,
    Mesh,
    Model,
    Out,
    Parallel,
    Pin,
    Pretrained,
    Quiet,
    RecipeName,
    Resume,
    Seed,
    Settings,
    ShowConfig,
    Sync,
    settings,
)
from manyhands.cli.train import what
from manyhands.core.errors import UserError
from manyhands.core.terminal import show


def launch(  # noqa: PLR0913 - one argument for each flag
    data: Data = None,
    model: Model = None,
    /,
    *arguments: Arguments,
    hosts: Annotated[
        str | None, Parameter(help="machines: n1,n2,n3; with processes: n1:4,n2:4; with a port: ssh://user@n1:31234")
    ] = None,
    hostfile: Hostfile = None,
    on: Annotated[str | None, Parameter(help="submit the job to a scheduler: slurm or kubernetes")] = None,
    interface: Interface = None,
    relay: Annotated[
        bool | None, Parameter(negative="", help="relay between machines that can't log in to each other")
    ] = None,
    detach: Annotated[
        bool | None, Parameter(negative="", help="keep training when this terminal closes or this machine goes down")
    ] = None,
    sync_code: Annotated[
        bool | None, Parameter(negative="", help="copy the code in this folder to the other machines first")
    ] = None,
    out: Out = None,
    resume: Resume = None,
    recipe: RecipeName = None,
    epochs: Epochs = None,
    batch: Batch = None,
    lr: Lr = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    parallel: Parallel = None,
    mesh: Mesh = None,
    pin: Pin = None,
    sync: Sync = None,
    elastic: Elastic = None,
    backend: Backend = None,
    device: Device = None,
    pretrained: Pretrained = None,
    compile_: Compile = None,
    debug_rank: DebugRank = None,
    set_: Settings = None,
    show_config: ShowConfig = False,
    dry_run: Annotated[bool, Parameter(negative="", help="print what would be started or submitted, and exit")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Train on several machines, started and monitored from here over ssh; or submit the job to a scheduler."""
    from manyhands.config.load import load_job
    from manyhands.parallel.options import MODE_OF_PLANS
    from manyhands.run.find import find_start

    job_file = Path(data) if data and data.endswith(".toml") else None
    flags: dict[str, Any] = {
        **what(data, model, arguments),
        "cluster.hosts": hosts.split(",") if hosts else None,
        "cluster.hostfile": hostfile,
        "cluster.on": on,
        "cluster.interface": interface,
        "cluster.relay": relay,
        "cluster.detach": detach,
        "cluster.sync_code": sync_code,
        "run.out": out,
        "checkpoint.resume": find_start(resume),
        "train.epochs": epochs,
        "train.batch": batch,
        "train.lr": lr,
        "train.seed": seed,
        "data.dir": data_dir,
        "parallel.mode": parallel or (MODE_OF_PLANS if pin else None),
        "parallel.mesh": mesh,
        "parallel.pin": tuple(pin) if pin else None,
        "sync.method": sync,
        "cluster.elastic": elastic,
        "cluster.backend": backend,
        "cluster.debug_rank": debug_rank,
        "cluster.device": device,
        "model.pretrained": pretrained,
        "train.compile": compile_,
    }
    loaded = load_job({**flags, **settings(set_ or [])}, file=job_file, recipe=recipe or "")
    if show_config:
        from manyhands.cli.show_config import print_config

        print_config(loaded)
        return 0
    if loaded.job.cluster.on and loaded.job.run.script:
        wrong = f"a script of your own can't be submitted to {loaded.job.cluster.on}"
        hints = ("name the machines: --hosts n1,n2", "or start the script without manyhands: srun, torchrun")
        raise UserError(wrong, "--on", hints)
    if loaded.job.cluster.on:
        from manyhands.run.submit import submit

        show(submit(loaded.job, job_file, loaded.job.cluster.on, dry_run=dry_run))
        return 0
    if not loaded.job.cluster.hosts and not loaded.job.cluster.hostfile:
        raise UserError(
            "no machines are named", "manyhands launch", ("add --hosts n1,n2 or --hostfile FILE", "or --on slurm")
        )
    from manyhands.cli.training import run

    return run(loaded, dry_run=dry_run, as_json=as_json, quiet=quiet)
