"""manyhands profile."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from manyhands.cli.flags import (
    AsJson,
    Backend,
    Batch,
    Compile,
    DataDir,
    Device,
    Model,
    Out,
    Parallel,
    Pretrained,
    Processes,
    Quiet,
    Settings,
    Sync,
    settings,
)
from manyhands.core.errors import UserError
from manyhands.core.terminal import plain, say, show, show_json

if TYPE_CHECKING:
    from manyhands.report.read import RunData


def profile(  # noqa: PLR0913 - one argument for each flag
    run: Annotated[
        str | None, Parameter(help="a run to analyse (folder, start of its name, last), or data or a job.toml to trace")
    ] = None,
    model: Model = None,
    /,
    *,
    steps: Annotated[int, Parameter(help="number of updates to trace, if RUN is not a run")] = 20,
    processes: Processes = None,
    batch: Batch = None,
    data_dir: DataDir = None,
    parallel: Parallel = None,
    sync: Sync = None,
    backend: Backend = None,
    device: Device = None,
    pretrained: Pretrained = None,
    compile_: Compile = None,
    out: Out = None,
    set_: Settings = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Show where each process of a run spends its time, and the change that would help most.

    manyhands profile RUN            reads the records of the run
    manyhands profile DATA MODEL …   trains for some updates and writes a trace for Perfetto
    """
    from manyhands.run.find import read_named

    found = read_named(run) if run and not model else None
    if found:
        _print_result(found, as_json=as_json)
        return 0
    if steps < 1:
        raise UserError(f"--steps must be 1 or more, found {steps}", "--steps", ("use --steps 20, for example",))
    from manyhands.config.load import load_job
    from manyhands.run.train import trace

    job_file = Path(run) if run and run.endswith(".toml") else None
    flags: dict[str, Any] = {
        "data.name": None if job_file else run,
        "model.name": model,
        "cluster.processes": processes,
        "train.batch": batch,
        "data.dir": data_dir,
        "parallel.mode": parallel,
        "sync.method": sync,
        "cluster.backend": backend,
        "cluster.device": device,
        "model.pretrained": pretrained,
        "train.compile": compile_,
        "run.out": out,
    }
    outcome = trace(load_job({**flags, **settings(set_ or [])}, file=job_file).job, steps, quiet=quiet)
    if outcome.is_main and not outcome.exit_code:
        _print_result(outcome.read(), as_json=as_json)
    return outcome.exit_code


def _print_result(run: "RunData", *, as_json: bool) -> None:
    from manyhands.report.time_shares import (
        best_change,
        change_line,
        mean_of,
        samples_of_each,
        seconds_by_rank,
        unequal_line,
    )

    ranks, change, trace = seconds_by_rank(run), best_change(run), run.folder.trace
    if as_json:
        suggestion = {"what": change.what, "gain": change.gain} if change else None
        more = {"trace": str(trace)} if trace.is_file() else {}
        shares = samples_of_each(run)
        show_json({"run": str(run.folder.path), "ranks": ranks, "shares": shares, "change": suggestion, **more})
        return
    if not change:
        show("the run has no time records yet; the first is written after half a minute or one epoch")
        return
    rows = [(str(rank), one) for rank, one in enumerate(ranks)]
    show(_table([*rows, ("mean", mean_of(ranks))] if len(rows) > 1 else rows))
    if unequal := unequal_line(run):
        show(unequal)
    show(plain(f"would help most: {change_line(run)}"))
    if trace.is_file():
        say(f"open {trace} in https://ui.perfetto.dev")


def _table(rows: "list[tuple[str, dict[str, float]]]") -> list[str]:
    """Seconds and per cent of each phase, a line for each process."""
    from manyhands.report.time_shares import shares_of

    columns = ["rank", "seconds", *rows[0][1]]
    lines = [columns]
    for name, seconds in rows:
        shares = shares_of(seconds)
        cells = [f"{value:.1f} s {shares[phase]:4.0%}" for phase, value in seconds.items()]
        lines.append([name, f"{sum(seconds.values()):.1f}", *cells])
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
