"""manyhands resume."""

from typing import Annotated

from cyclopts import Parameter

from manyhands.cli.flags import AT_LEAST_ONE, AsJson, DebugRank, Quiet, Settings, settings


def resume(  # noqa: PLR0913 - one argument for each flag
    name: Annotated[str, Parameter(name="RUN", help="a run's folder, part of its name, or last")],
    /,
    *,
    processes: Annotated[
        int | None, Parameter(name=["-n", "--processes"], validator=AT_LEAST_ONE, help="processes on this machine")
    ] = None,
    epochs: Annotated[int | None, Parameter(help="number of epochs in all, to train longer than the job says")] = None,
    detach: Annotated[
        bool | None, Parameter(help="keep training without this terminal and machine; default: as at launch")
    ] = None,
    debug_rank: DebugRank = None,
    set_: Settings = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Resume a stopped or failed run at the exact next sample, on any number of processes."""
    from manyhands.cli.training import run
    from manyhands.run.resume import load_resumed

    flags = {
        "cluster.processes": processes, "train.epochs": epochs, "cluster.detach": detach,
        "cluster.debug_rank": -1 if debug_rank is None else debug_rank, **settings(set_ or []),
    }  # fmt: skip
    loaded = load_resumed(name, flags)
    return run(loaded, dry_run=False, as_json=as_json, quiet=quiet, resume_hint=True)
