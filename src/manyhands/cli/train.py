"""manyhands train."""

import re
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
    DebugRank,
    Device,
    DryRun,
    Elastic,
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
    RecipeName,
    Resume,
    Seed,
    Settings,
    ShowConfig,
    Sync,
    settings,
)
from manyhands.core.errors import UserError


def train(  # noqa: PLR0913 - one argument for each flag
    data: Data = None,
    model: Model = None,
    /,
    *arguments: Arguments,
    processes: Processes = None,
    recipe: RecipeName = None,
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
    elastic: Elastic = None,
    init: Annotated[str | None, Parameter(help="rendezvous URL: tcp://HOST:PORT, file:///PATH or env://")] = None,
    world_size: Annotated[int | None, Parameter(help="with --init: number of processes on all machines")] = None,
    rank: Annotated[int | None, Parameter(help="with --init: rank of this process, counted from 0")] = None,
    rank_table: Annotated[str | None, Parameter(help="Ascend rank table that lists this machine")] = None,
    cluster: Annotated[str | None, Parameter(help="cluster file that lists this machine")] = None,
    backend: Backend = None,
    device: Device = None,
    pretrained: Pretrained = None,
    compile_: Compile = None,
    debug_rank: DebugRank = None,
    set_: Settings = None,
    show_config: ShowConfig = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Train a classifier.

    Every option of the job is also a flag, such as --train.momentum 0.8; --show-config lists all options.
    """
    from manyhands.config.load import load_job
    from manyhands.parallel.options import MODE_OF_PLANS
    from manyhands.run.find import find_start

    flags: dict[str, Any] = {
        **what(data, model, arguments),
        "cluster.processes": processes,
        "train.epochs": epochs,
        "train.batch": batch,
        "train.lr": lr,
        "train.seed": seed,
        "run.out": out,
        "checkpoint.resume": find_start(resume),
        "data.dir": data_dir,
        "parallel.mode": parallel or (MODE_OF_PLANS if pin else None),
        "parallel.mesh": mesh,
        "parallel.pin": tuple(pin) if pin else None,
        "sync.method": sync,
        "cluster.elastic": elastic,
        "cluster.init": init,
        "cluster.world_size": world_size,
        "cluster.rank": rank,
        "cluster.rank_table": rank_table,
        "cluster.file": cluster,
        "cluster.backend": backend,
        "cluster.debug_rank": debug_rank,
        "cluster.device": device,
        "model.pretrained": pretrained,
        "train.compile": compile_,
    }
    job_file = Path(data) if data and data.endswith(".toml") else None
    loaded = load_job({**flags, **settings(set_ or [])}, file=job_file, recipe=recipe or "")
    if show_config:
        from manyhands.cli.show_config import print_config

        print_config(loaded)
        return 0
    from manyhands.cli.training import run

    return run(loaded, dry_run=dry_run, as_json=as_json, quiet=quiet)


def what(data: str | None, model: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Which data and network are to be trained, or which script of the user's is to run, by dotted key.

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
    return {"model.name": model, "data.name": None if data and data.endswith(".toml") else data}
