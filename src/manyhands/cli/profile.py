"""manyhands profile."""

from typing import TYPE_CHECKING, Annotated

from manyhands.cli.flags import Help, Int, JobFlags, Model, Processes, RunFlags, load, named
from manyhands.cli.printing import align, print_config
from manyhands.core.errors import UserError
from manyhands.core.terminal import plain, say, show, show_json

if TYPE_CHECKING:
    from manyhands.report.read import RunData


def profile(
    run: Annotated[
        str | None, Help("a run to analyse (folder, start of its name, or last), or a data set or job.toml to trace")
    ] = None,
    model: Model = None,
    /,
    *,
    steps: Annotated[Int, Help("number of updates to train and trace; unused if RUN is a run")] = 20,
    processes: Processes = None,
    job: JobFlags = JobFlags(),
    output: RunFlags = RunFlags(),
) -> int:
    """Show where each process of a run spends its time, and the change that would help most.

    manyhands profile RUN            reads the records of the run
    manyhands profile DATA MODEL …   trains for some updates and writes a trace for Perfetto
    """
    from manyhands.run.find import read_named
    from manyhands.run.train import trace

    found = read_named(run) if run and not model else None
    if found:
        _print_result(found, as_json=output.as_json)
        return 0
    if steps < 1:
        raise UserError(f"--steps must be 1 or more, found {steps}", "--steps", ("use --steps 20, for example",))
    values, file = named(run, model)
    loaded = load(values | {"cluster.processes": processes}, job, output, file=file, recipe=job.recipe)
    if output.show_config:
        return print_config(loaded)
    if output.dry_run:
        from manyhands.cli.training import run_job

        return run_job(loaded, output)
    outcome = trace(loaded.job, steps, quiet=output.quiet)
    if outcome.is_main and not outcome.exit_code:
        _print_result(outcome.read(), as_json=output.as_json)
    return outcome.exit_code


def _print_result(run: "RunData", *, as_json: bool) -> None:
    from manyhands.report import time_shares

    ranks, change, trace = time_shares.seconds_by_rank(run), time_shares.best_change(run), run.folder.trace
    if as_json:
        suggestion = {"what": change.what, "gain": change.gain} if change else None
        more = {"trace": str(trace)} if trace.is_file() else {}
        shares = time_shares.samples_of_each(run)
        show_json({"run": str(run.folder.path), "ranks": ranks, "shares": shares, "change": suggestion, **more})
        return
    if not change:
        show("the run has no time records yet; the first is written after half a minute or one epoch")
        return
    rows = {str(rank): seconds for rank, seconds in enumerate(ranks)}
    if len(rows) > 1:
        rows["mean"] = time_shares.mean_of(ranks)
    lines = [["rank", "seconds", *ranks[0]]]
    for name, seconds in rows.items():
        shares = time_shares.shares_of(seconds)
        cells = [f"{value:.1f} s {shares[phase]:4.0%}" for phase, value in seconds.items()]
        lines.append([name, f"{sum(seconds.values()):.1f}", *cells])
    show(align(lines, left=0))
    if unequal := time_shares.unequal_line(run):
        show(unequal)
    show(plain(f"would help most: {time_shares.change_line(run)}"))
    if trace.is_file():
        say(f"open {trace} in https://ui.perfetto.dev")
