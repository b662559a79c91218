"""manyhands plan."""

import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from manyhands.cli.flags import AsJson, Batch, DataDir, Device, Elastic, Model, Settings, Sync, settings
from manyhands.core.errors import EXIT_FAILED, EXIT_OK, UserError
from manyhands.core.terminal import plain, say, show, show_json

if TYPE_CHECKING:
    from rich.console import Console

    from manyhands.worker.plan_search import Planned
    from manyhands.worker.plan_show import Shown

_WIDTH, _TABLE_WIDTH = 155, 100
_MOST_PROCESSES = 1 << 20

Target = Annotated[str | None, Parameter(help="a job.toml, a data set or folder as in train, or a plan.json to show")]
WorldSize = Annotated[
    str | None,
    Parameter(
        name=["-n", "--processes", "--world-size"],
        help="number of processes, by default the job's, or 2; a range such as 1..1024 predicts scaling",
    ),
]


def plan(  # noqa: PLR0913 - one argument for each flag
    target: Target = None,
    model: Model = None,
    other_model: Annotated[str | None, Parameter(help="the network, after a plan.json and its data")] = None,
    /,
    *,
    processes: WorldSize = None,
    mesh: Annotated[str | None, Parameter(help="the only mesh to consider, such as dp=2,tp=2; default: all")] = None,
    pin: Annotated[list[str] | None, Parameter(negative="", help='required sharding of one op: "fc=n@dp o@tp"')] = None,
    memory: Annotated[str | None, Parameter(help="memory limit of each process, such as 14GiB")] = None,
    link: Annotated[
        str | None, Parameter(help="network speed between machines of one process each: 10mbit; default: one machine")
    ] = None,
    fill: Annotated[
        Literal["search", "data"], Parameter(help="ops without --pin: search their sharding, or split samples (data)")
    ] = "search",
    no_measure: Annotated[bool, Parameter(negative="", help="estimate all times without running anything")] = False,
    out: Annotated[
        Path | None,
        Parameter(help="plan file, with a picture beside it; default: plan.json; of a range: the picture, .svg"),
    ] = None,
    force: Annotated[bool, Parameter(negative="", help="overwrite an existing plan")] = False,
    verify: Annotated[
        bool, Parameter(negative="", help="verify here that the plan computes the same as one process")
    ] = False,
    measure: Annotated[bool, Parameter(negative="", help="time a plan.json and data parallelism in turns")] = False,
    batch: Batch = None,
    sync: Sync = None,
    elastic: Elastic = None,
    data_dir: DataDir = None,
    device: Device = None,
    device_model: Annotated[
        str | None, Parameter(help="estimate for another device model: h100, a100, 910b, rtx4090 …")
    ] = None,
    set_: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Find the best parallel plan for a network and explain the choice; or show, verify and time a plan.

    manyhands plan cifar10 resnet50 -n 4         writes plan.json and plan.png
    manyhands plan plan.json --verify --measure  shows, verifies and times the plan
    manyhands plan cifar10 resnet50 --batch 1024 -n 1..1024 --link 10gbit --out growth.svg
    """
    flags: dict[str, Any] = {
        "train.batch": batch, "sync.method": sync, "data.dir": data_dir, "cluster.device": device,
        "cluster.elastic": elastic,
        **settings(set_ or []),
    }  # fmt: skip
    if target and target.endswith(".json"):
        if model and model.endswith(".json"):
            raise UserError("two plans are named", "", ("name one plan: manyhands plan plan.json",))
        flags |= {"data.name": model, "model.name": other_model}
        return _old(Path(target), flags, verify=verify, measure=measure, as_json=as_json)
    if other_model:
        raise UserError(f"unexpected argument {other_model}", "", ("use manyhands plan DATA MODEL",))
    if measure:
        raise UserError("--measure needs a plan.json; a search always measures", "--measure", ("remove --measure",))
    job_file = Path(target) if target and target.endswith(".toml") else None
    flags |= {"model.name": model, "data.name": None if job_file else target}
    first, last = _counts(processes)
    if first != last:
        alone = {"--mesh": mesh, "--pin": pin, "--memory": memory, "--verify": verify}
        requested = {"first": first, "last": last, "measure": not no_measure}
        requested |= {"link": link or "", "device_model": device_model or ""}
        return _grow(flags, job_file, requested, alone, out, force=force, as_json=as_json)
    requested = (last, mesh, pin, memory, link, fill, not no_measure, device_model)
    return _new(flags, job_file, requested, out or Path("plan.json"), force=force, verify=verify, as_json=as_json)


def _counts(text: str | None) -> tuple[int, int]:
    """The least and the greatest number of processes; 0 where none is named."""
    if text is None:
        return 0, 0
    first, dots, last = text.partition("..")
    try:
        counts = int(first), int(last if dots else first)
    except ValueError:
        counts = 0, 0
    if not 1 <= counts[0] <= counts[1] <= _MOST_PROCESSES:
        what = f"{plain(text)} is not a number of processes, or a range of numbers, up to {_MOST_PROCESSES:,}"
        raise UserError(what, "--world-size", ("use --world-size 4", "or --world-size 1..1024"))
    return counts


def _grow(
    flags: dict[str, Any],
    job_file: Path | None,
    requested: dict[str, Any],
    alone: dict[str, Any],
    out: Path | None,
    *,
    force: bool,
    as_json: bool,
) -> int:
    from manyhands.config.load import load_job
    from manyhands.report.growth import growth_table
    from manyhands.run.plan import predict_growth

    if given := next((name for name, value in alone.items() if value), ""):
        what = f"{given} needs one number of processes; a range is predicted for data parallelism only"
        raise UserError(what, given, (f"remove {given}", "or use --world-size 4"))
    growth = predict_growth(load_job(flags, file=job_file).job, requested, out, force=force)
    for note in growth.notes:
        say(note)
    to = sys.stderr if as_json else sys.stdout
    wide(to).print(growth_table(growth.rows))
    if spread := growth.about["spread"]:
        show(f"repeated timings on this machine differ by {spread:.0%}", to)
    if out is not None:
        show(str(out), to)
    if as_json:
        show_json(growth.as_plain())
    return EXIT_OK


def _new(
    flags: dict[str, Any],
    job_file: Path | None,
    requested: tuple[Any, ...],
    out: Path,
    *,
    force: bool,
    verify: bool,
    as_json: bool,
) -> int:
    from manyhands.config.load import load_job
    from manyhands.run.plan import search_plan, show_plan

    job = load_job(flags, file=job_file).job
    processes, mesh, pin, memory, link, fill, measured, device_model = requested
    options = job.parallel
    wanted = {
        "world_size": processes or job.cluster.processes or 2,
        "mesh": mesh or options.mesh,
        "pins": tuple(pin) if pin else options.pin,
        "memory": memory or options.memory,
        "link": link or options.link,
        "fill": fill,
        "measure": measured,
        "device_model": device_model or "",
    }
    planned, files = search_plan(job, wanted, out, force=force)
    _print_search(planned, files, to=sys.stderr if as_json else sys.stdout)
    if as_json:
        show_json(planned.as_plain(files))
    if not verify:
        return EXIT_OK
    return _verify(show_plan(out, {key: value for key, value in flags.items() if key != "train.batch"}))


def _print_search(planned: "Planned", files: tuple[Path, Path], to: Any) -> None:
    from manyhands.planner.explain import candidates_table

    found, advice = planned.found, planned.advice
    for note in planned.notes:
        say(note)
    answer, *more = advice.reason.splitlines()
    if found.spread:
        more.append(f"repeated timings on this machine differ by {found.spread:.0%}")
    show(answer, to)
    wide(to, _TABLE_WIDTH).print(candidates_table(planned.candidates, advice.name, "\n".join(more)))
    show(f"wrote {files[0]} and {files[1]}", to)


def wide(file: Any, least: int = _WIDTH) -> "Console":
    """A console for tables: a terminal that is too narrow wraps their lines, where rich would cut numbers off."""
    from rich.console import Console

    console = Console(file=file, highlight=False)
    return Console(file=file, highlight=False, width=max(least, console.width))


def _old(path: Path, flags: dict[str, Any], *, verify: bool, measure: bool, as_json: bool) -> int:
    from manyhands.run.plan import show_plan, time_plan

    shown = show_plan(path, flags)
    if as_json:
        show_json(shown.as_plain())
    else:
        _print_plan(shown)
    code = _verify(shown) if verify else EXIT_OK
    if measure:
        from manyhands.planner.choose import pick_measured

        seconds = time_plan(shown)
        for name, values in seconds.items():
            show(f"{name:<15} {statistics.median(values) * 1e3:8.1f} ms per update, median of {len(values)} rounds",
                 sys.stderr if as_json else sys.stdout)  # fmt: skip
        show(pick_measured(seconds).reason, sys.stderr if as_json else sys.stdout)
    return code


def _print_plan(shown: "Shown") -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    plan = shown.plan
    show(f"mesh {plan.mesh}, default sharding {plan.fallback}")
    for key in ("mode", "reason"):
        if key in plan.about:
            show(plain(f"{key}: {plan.about[key]}"))
    sync = plan.about.get("sync")
    if isinstance(sync, dict) and "reason" in sync:
        show(plain(f"sync: {sync['reason']}"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("op", "kind", "strategy", "piece", "parameters MB", "collectives"):
        table.add_column(name, justify="right" if name == "parameters MB" else "left")
    for row in shown.rows:
        size = f"{row.parameter_mb:.2f}" if row.parameter_mb else ""
        # Text, not strings: a shape's brackets would be read as a style.
        table.add_row(
            *(Text(plain(cell)) for cell in (row.name, row.kind, row.strategy, row.piece, size, row.collectives))
        )
    wide(sys.stdout).print(table)
    for note in shown.notes:
        say(note)


def _verify(shown: "Shown") -> int:
    from manyhands.run.plan import verify_plan

    verification = verify_plan(shown)
    what = f"largest difference {verification['worst']:.1e} of the largest value, in {verification['where']}"
    size = shown.plan.mesh.size
    words = "computes the same as one process" if verification["holds"] else "DOES NOT compute the same as one process"
    show(f"on {size} processes the plan {words}: {what} ({verification['compared']} tensors, float64)", sys.stderr)
    return EXIT_OK if verification["holds"] else EXIT_FAILED
