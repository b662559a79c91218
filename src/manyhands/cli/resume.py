"""manyhands resume."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manyhands.cli.flags import AsJson, Quiet, Settings
from manyhands.cli.train import run, settings
from manyhands.config.load import load_job
from manyhands.core.folder import RunFolder
from manyhands.report.read import read_run


def resume(
    folder: Annotated[Path, Parameter(help="the run folder")],
    /,
    *,
    processes: Annotated[int | None, Parameter(name=["-n", "--processes"], help="may differ from before")] = None,
    epochs: Annotated[int | None, Parameter(help="train longer than the job said")] = None,
    set_: Settings = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Go on with a stopped or broken run, at the exact next sample, on any number of processes."""
    read_run(folder)
    flags = {
        "run.out": str(folder), "checkpoint.resume": "auto", "cluster.processes": processes, "train.epochs": epochs,
        **settings(set_ or []),
    }  # fmt: skip
    return run(load_job(flags, file=RunFolder(folder).job), dry_run=False, as_json=as_json, quiet=quiet)
