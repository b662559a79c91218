"""Plans for a job: found, shown, proven and timed. Tensors are the worker's affair; its processes are started here."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.config.job import Job
from manyhands.run.load import load_worker
from manyhands.run.task import run_by_agent
from manyhands.run.train import check_names

if TYPE_CHECKING:
    from manyhands.worker.plan_growth import Growth
    from manyhands.worker.plan_search import Planned
    from manyhands.worker.plan_show import Shown


def search_plan(
    job: Job, requested: Mapping[str, Any], out: Path, *, force: bool
) -> "tuple[Planned, tuple[Path, Path]]":
    """Finds the plan for a job and writes it.

    Args:
        job: what is to be trained.
        requested: of its plan, as `PlanRequest` has them; pins as they were written.
        out: the plan's file; its picture lies beside it.
        force: write over an older plan.

    Returns:
        What was found, and both files.

    Raises:
        ManyhandsError: a wish can't be fulfilled, or timing failed.
    """
    check_names(job)
    with _uncollected():
        return load_worker("plan_search").search_plan(job, requested, out, run_by_agent, force=force)


def predict_growth(job: Job, requested: Mapping[str, Any], out: Path | None, *, force: bool) -> "Growth":
    """Predicts throughput, efficiency and cost of a job on several numbers of machines.

    Args:
        job: what is to be trained.
        requested: as `GrowthRequest` has them.
        out: where the picture goes; None for none.
        force: write over an older one.

    Raises:
        UserError: a wish can't be fulfilled, or the picture can't be written there.
    """
    from manyhands.report.growth import draw_growth, refuse_file

    if out is not None:
        refuse_file(out, force=force)
    with _uncollected():
        growth: Growth = load_worker("plan_growth").predict_growth(job, requested)
    if out is not None:
        draw_growth(growth.rows, growth.title, out)
    return growth


@contextmanager
def _uncollected() -> Iterator[None]:
    """Looks for no garbage meanwhile: a search, and what it imports, make many small objects and keep nearly all."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def show_plan(path: Path, flags: Mapping[str, Any]) -> "Shown":
    """Reads a plan and looks at its network: what flags name, else the plan's own.

    Raises:
        UserError: it is no plan, or doesn't fit the network.
    """
    return load_worker("plan_show").show_plan(path, flags)


def verify_plan(shown: "Shown") -> dict[str, Any]:
    """Proves on real processes of this machine that a plan computes what one process does, in double precision.

    Returns:
        worst, where, compared and holds; see `planner.trial.Proof`.

    Raises:
        ManyhandsError: the processes failed.
    """
    return run_by_agent(*shown.verification())["proofs"]["plan"]


def time_plan(shown: "Shown") -> dict[str, list[float]]:
    """Seconds of updates under a plan and data parallel, in turns, on processes of this machine."""
    return run_by_agent(*shown.comparison())["seconds"]
