"""Plans for a job: searched, shown, verified and timed. The worker computes; its processes are started here."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.config.job import Job
from manyhands.run.tasks import run_by_agent
from manyhands.run.train import check_names

if TYPE_CHECKING:
    from manyhands.worker.plan_growth import Growth
    from manyhands.worker.plan_search import Planned
    from manyhands.worker.plan_show import Shown


def search_plan(
    job: Job, requested: Mapping[str, Any], out: Path, *, force: bool
) -> "tuple[Planned, tuple[Path, Path]]":
    """Searches the plan for a job and writes it to `out`, with a picture beside it; see `worker.plan_search`.

    Raises:
        ManyhandsError: the job or a request can't be satisfied, or timing failed.
    """
    check_names(job)
    with _no_garbage_collection():
        from manyhands.worker import plan_search

        return plan_search.search_plan(job, requested, out, run_by_agent, force=force)


def predict_growth(job: Job, requested: Mapping[str, Any], out: Path | None, *, force: bool) -> "Growth":
    """Predicts throughput, efficiency and cost of a job on several numbers of machines, and draws them to `out`.

    Raises:
        UserError: a request can't be satisfied, or the picture can't be written.
    """
    from manyhands.report.growth import draw_growth, refuse_file

    if out is not None:
        refuse_file(out, force=force)
    with _no_garbage_collection():
        from manyhands.worker import plan_growth

        growth = plan_growth.predict_growth(job, requested)
    if out is not None:
        draw_growth(growth.rows, growth.title, out)
    return growth


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A search, and what it imports, make many small objects and keep nearly all."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def show_plan(path: Path, flags: Mapping[str, Any]) -> "Shown":
    """Reads a plan and describes the network that the flags, or else the plan, name; see `worker.plan_show`."""
    from manyhands.worker import plan_show

    return plan_show.show_plan(path, flags)


def verify_plan(shown: "Shown") -> dict[str, Any]:
    """Verifies with processes of this machine that a plan computes what one process does, in double precision.

    Returns:
        worst, where, compared and holds; see `planner.trial.Proof`.
    """
    return run_by_agent(*shown.verification())["proofs"]["plan"]


def time_plan(shown: "Shown") -> dict[str, list[float]]:
    """Times updates under a plan and data parallel, in turns, on processes of this machine; in seconds."""
    return run_by_agent(*shown.comparison())["seconds"]
