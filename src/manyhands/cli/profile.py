"""manyhands profile."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from manyhands.core.shown import plain, show, show_json

if TYPE_CHECKING:
    from manyhands.report.read import RunData


def profile(
    run: Annotated[str, Parameter(help="a run's folder or its short name")],
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="one JSON object")] = False,
) -> int:
    """Say what a run's time goes to on each process, and the one change that would help most."""
    from manyhands.report.read import read_run
    from manyhands.run.find import find_reference

    _tell(read_run(find_reference(run)), as_json=as_json)
    return 0


def _tell(run: "RunData", *, as_json: bool) -> None:
    from manyhands.report.time_shares import best_change, change_line, mean_of, seconds_by_rank

    ranks, change = seconds_by_rank(run), best_change(run)
    if as_json:
        told = {"what": change.what, "gain": change.gain} if change else None
        show_json({"run": str(run.folder.path), "ranks": ranks, "change": told})
        return
    if not change:
        show("nothing is recorded yet: that comes with the first epoch's end, or after half a minute")
        return
    rows = [(str(rank), one) for rank, one in enumerate(ranks)]
    show(_table([*rows, ("mean", mean_of(ranks))] if len(rows) > 1 else rows))
    show(plain(f"would help most: {change_line(run)}"))


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
