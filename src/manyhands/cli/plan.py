"""The command plan, which finds, shows, verifies and times parallel plans."""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from manyhands.cli.flags import Batch, DataDir, Device, Elastic, Flags, Help, Json, Model, Settings, Sync
from manyhands.core.errors import EXIT_FAILED, EXIT_OK, UserError
from manyhands.core.terminal import plain, say, show, show_json

if TYPE_CHECKING:
    from rich.console import Console

    from manyhands.config.job import Job
    from manyhands.worker.plan_show import ShownPlan

_WIDTH, _TABLE_WIDTH = 155, 100
_MOST_PROCESSES = 1 << 20


@dataclass(kw_only=True, eq=False, repr=False)
class PlanFlags(Flags):
    """The flags of plan: the plan to search for or to show, and its job."""

    processes: Annotated[
        str | None,
        Parameter(
            name=["-n", "--processes", "--world-size"],
            help="number of processes; default: from the job, or 2; for a range such as 1..1024, scaling is predicted",
        ),
    ] = None
    mesh: Annotated[str | None, Help("only mesh to consider, such as dp=2,tp=2; default: all meshes")] = None
    pin: Annotated[list[str] | None, Help('fixed sharding of an op, such as "fc=n@dp o@tp"')] = None
    memory: Annotated[str | None, Help("memory limit per process, such as 14GiB")] = None
    link: Annotated[
        str | None, Help("bandwidth between machines with one process each, such as 10mbit; default: one machine")
    ] = None
    fill: Annotated[
        Literal["search", "data"], Help("sharding of ops without --pin; search: the fastest; data: shard the batch")
    ] = "search"
    no_measure: Annotated[bool, Help("estimate all times instead of measuring on this machine")] = False
    out: Annotated[
        Path | None, Help("plan.json to write, with a picture beside it; for a range of processes: the .svg to write")
    ] = None
    force: Annotated[bool, Help("overwrite an existing plan")] = False
    verify: Annotated[bool, Help("verify on this machine that the plan computes the same as one process")] = False
    measure: Annotated[bool, Help("time updates with an existing plan.json and with data parallelism")] = False
    batch: Batch = None
    sync: Sync = None
    elastic: Elastic = None
    data_dir: DataDir = None
    device: Device = None
    device_model: Annotated[str | None, Help("device model to estimate times for: h100, a100, 910b, rtx4090 …")] = None
    set_: Settings = None
    as_json: Json = False

    @property
    def output(self) -> Any:
        return sys.stderr if self.as_json else sys.stdout


def plan(
    target: Annotated[str | None, Help("a job.toml, a data set or folder as in train, or a plan.json to show")] = None,
    model: Model = None,
    other_model: Annotated[str | None, Help("the network, if a plan.json and a data set come first")] = None,
    /,
    *,
    flags: PlanFlags = PlanFlags(),
) -> int:
    """Find the best parallel plan for a network and explain the choice; or show, verify and time a plan.

    manyhands plan cifar10 resnet50 -n 4         writes plan.json and plan.png
    manyhands plan plan.json --verify --measure  shows, verifies and times the plan
    manyhands plan cifar10 resnet50 --batch 1024 -n 1..1024 --link 10gbit --out growth.svg
    """
    if target and target.endswith(".json"):
        if model and model.endswith(".json"):
            raise UserError("two plans are named", "", ("name one plan: manyhands plan plan.json",))
        return _show_plan(Path(target), flags.job_values() | {"data.name": model, "model.name": other_model}, flags)
    if other_model:
        raise UserError(f"unexpected argument {other_model}", "", ("use manyhands plan DATA MODEL",))
    if flags.measure:
        hints = ("remove --measure: a search for a plan measures by default",)
        raise UserError("--measure applies only to an existing plan.json", "--measure", hints)
    first, last = _parse_counts(flags.processes)
    if first != last:
        alone = {"--mesh": flags.mesh, "--pin": flags.pin, "--memory": flags.memory, "--verify": flags.verify}
        if given := next((name for name, value in alone.items() if value), ""):
            what = f"{given} does not apply to a range of processes, which is predicted for data parallelism only"
            raise UserError(what, given, (f"remove {given}", "or use --world-size 4"))
    from manyhands.cli.flags import load, parse_names

    values, file = parse_names(target, model)
    job = load(values, flags, file=file).job
    if first != last:
        return _predict_scaling(job, first, last, flags)
    return _search_plan(job, last, flags, values | flags.job_values())


def _parse_counts(text: str | None) -> tuple[int, int]:
    """Parses a number of processes or a range such as 1..64. Returns (smallest, largest) number; (0, 0) for None."""
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


def _predict_scaling(job: "Job", first: int, last: int, flags: PlanFlags) -> int:
    from manyhands.report.growth import growth_table
    from manyhands.run.tasks import predict_growth

    requested = {"world_size": last, "measure": not flags.no_measure}
    requested |= {"link": flags.link or "", "device_model": flags.device_model or ""}
    growth = predict_growth(job, first, requested, flags.out, force=flags.force)
    for note in growth.notes:
        say(note)
    wide_console(flags.output).print(growth_table(growth.rows))
    if spread := growth.about["spread"]:
        show(f"repeated timings on this machine differ by {spread:.0%}", flags.output)
    if flags.out is not None:
        show(str(flags.out), flags.output)
    if flags.as_json:
        show_json(growth.as_plain())
    return EXIT_OK


def _search_plan(job: "Job", processes: int, flags: PlanFlags, values: dict[str, Any]) -> int:
    """Finds, writes and explains the best plan; `values` are the job options by dotted key, for --verify."""
    from manyhands.planner.explain import candidates_table
    from manyhands.run.tasks import search_plan

    options = job.parallel
    requested = {
        "world_size": processes or job.cluster.processes or 2,
        "mesh": flags.mesh or options.mesh,
        "pins": tuple(flags.pin or ()) or options.pin,
        "memory": flags.memory or options.memory,
        "link": flags.link or options.link,
    }
    requested |= {"fill": flags.fill, "measure": not flags.no_measure, "device_model": flags.device_model or ""}
    out = flags.out or Path("plan.json")
    planned = search_plan(job, requested, out, force=flags.force)
    found, advice = planned.found, planned.advice
    for note in planned.notes:
        say(note)
    answer, *more = advice.reason.splitlines()
    if found.spread:
        more.append(f"repeated timings on this machine differ by {found.spread:.0%}")
    show(answer, flags.output)
    wide_console(flags.output, _TABLE_WIDTH).print(candidates_table(planned.candidates, advice.name, "\n".join(more)))
    show(f"wrote {planned.files[0]} and {planned.files[1]}", flags.output)
    if flags.as_json:
        show_json(planned.as_plain())
    if not flags.verify:
        return EXIT_OK
    from manyhands.worker.plan_show import show_plan

    return _verify_plan(show_plan(out, {key: value for key, value in values.items() if key != "train.batch"}))


def wide_console(file: Any, least: int = _WIDTH) -> "Console":
    """Returns a console at least `least` columns wide, because rich truncates numbers in tables on narrow terminals."""
    from rich.console import Console

    console = Console(file=file, highlight=False)
    return Console(file=file, highlight=False, width=max(least, console.width))


def _show_plan(path: Path, values: dict[str, Any], flags: PlanFlags) -> int:
    from manyhands.run.tasks import run_by_agent
    from manyhands.worker.plan_show import show_plan

    shown = show_plan(path, values)
    if flags.as_json:
        show_json(shown.as_plain())
    else:
        _print_plan(shown)
    code = _verify_plan(shown) if flags.verify else EXIT_OK
    if flags.measure:
        from manyhands.planner.choose import pick_measured

        seconds = run_by_agent(*shown.make_task(verify=False))["seconds"]
        for name, times in seconds.items():
            median = f"{statistics.median(times) * 1e3:8.1f} ms"
            show(f"{name:<15} {median} per update, median of {len(times)} rounds", flags.output)
        show(pick_measured(seconds).reason, flags.output)
    return code


def _print_plan(shown: "ShownPlan") -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    plan = shown.plan
    show(f"mesh {plan.mesh}, default sharding {plan.default_strategy}")
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
        # As Text, because strings with a shape's brackets would be parsed as styles.
        cells = (row.name, row.kind, row.strategy, row.piece, size, row.collectives)
        table.add_row(*(Text(plain(cell)) for cell in cells))
    wide_console(sys.stdout).print(table)
    for note in shown.notes:
        say(note)


def _verify_plan(shown: "ShownPlan") -> int:
    from manyhands.run.tasks import run_by_agent

    verification = run_by_agent(*shown.make_task(verify=True))["proofs"]["plan"]
    what = f"largest difference {verification['worst']:.1e} of the largest value, in {verification['where']}"
    words = "computes the same as one process" if verification["holds"] else "DOES NOT compute the same as one process"
    how = f"({verification['compared']} tensors, float64)"
    show(f"on {shown.plan.mesh.size} processes the plan {words}: {what} {how}", sys.stderr)
    return EXIT_OK if verification["holds"] else EXIT_FAILED
