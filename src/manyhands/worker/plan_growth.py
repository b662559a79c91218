"""Predicts how training scales with the number of machines in the mode data."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh
from manyhands.planner.find import SearchRequest, price
from manyhands.planner.links import LinkSpeeds, links_of
from manyhands.planner.timing import OpTimes, Timing
from manyhands.sync.choose import EXACT, check_method
from manyhands.sync.link_speeds import WITHIN_A_MACHINE
from manyhands.train.optimize import slots_of
from manyhands.worker.plan_advice import plan_sync, sync_seconds, sync_taken, sync_words
from manyhands.worker.plan_case import Costs, JobCase, case_to_plan
from manyhands.worker.plan_search import with_processes
from manyhands.worker.plan_trials import norm_group

# What timing shares of an update may take together, and each of them.
_BUDGET_S, _EACH_S, _ROUNDS = 60.0, 1.0, 3
# Each number up to this is priced; of more machines, doubles.
_FEW = 4
_HOUR_S = 3600.0


@dataclass(frozen=True)
class GrowthRequest:
    """The user's request for a scaling prediction, as text."""

    first: int  # the least number of machines
    last: int  # the greatest
    link: str = ""  # such as 1gbit, between any two of them; empty for the job's
    measure: bool = True  # time one machine's shares here
    device_model: str = ""  # the machines' devices, where they aren't this machine's; nothing is measured then

    def counts(self, most: int) -> list[int]:
        """Returns the numbers of machines to predict for, ascending, none above `most`."""
        last = min(self.last, most)
        doubles = (1 << power for power in range(last.bit_length()))
        return sorted({self.first, last, *(one for one in (*range(1, _FEW), *doubles) if self.first <= one <= last)})


@dataclass(frozen=True)
class Growth:
    """A scaling prediction."""

    rows: tuple[dict[str, Any], ...]  # for each number of machines, ascending: plain data
    about: dict[str, Any]  # the job, as plain data
    notes: tuple[str, ...]  # sentences on what was left out or is in doubt

    @property
    def title(self) -> str:
        """The title of the picture."""
        return f"{self.about['model']} on {self.about['data']}, {self.about['link']} between machines, predicted"

    def as_plain(self) -> dict[str, Any]:
        """Returns the prediction as JSON data."""
        return {**self.about, "rows": list(self.rows), "notes": list(self.notes)}


def predict_growth(job: Job, requested: Mapping[str, Any]) -> Growth:
    """Predicts throughput, efficiency and cost on several numbers of machines of one process each.

    Args:
        job: the job.
        requested: the fields of `GrowthRequest`.

    Raises:
        UserError: a request can't be satisfied.
    """
    request = GrowthRequest(**requested)
    check_method(job.sync.method)
    case = case_to_plan(job, request.last, request.link, request.device_model)
    if case.between is None:
        hints = ("set the link speed: --link 1gbit", "or choose one number of processes: -n 4")
        raise UserError("predictions for a range of machines need the speed of their links", "--link", hints)
    counts, notes = _counts(case, request)
    measure = request.measure and not request.device_model
    case = case.resolved(request.last, measure=measure)
    costs = Costs(with_processes(case.job, request.last), case.network, case.device, case.between, measured=measure)
    batch = case.network["batch"]
    timed = _shares(costs, {-(-batch // count): count for count in counts})
    rows = _rows(case, costs, {count: timed[-(-batch // count)] for count in counts})
    spread = max((one.spread for one in timed.values() if one), default=0.0)
    about = {
        "model": case.job.model.name,
        "data": case.job.data.name,
        "precision": case.job.train.precision,
        "device": case.device,
        "link": request.link or case.job.sync.link,
        "measured": measure,
        "spread": round(spread, 3),
    }
    return Growth(tuple(rows), about, (*case.said, *notes))


def _counts(case: JobCase, request: GrowthRequest) -> tuple[list[int], tuple[str, ...]]:
    batch = case.network["batch"]
    what, hints = (
        f"train.batch is {batch}, so at most {batch} machines can share an update",
        f"set --batch {request.last} or higher",
    )
    if request.first > batch:
        raise UserError(what, "train.batch", (hints,))
    return request.counts(min(request.last, batch)), ((f"{what}; {hints}",) if batch < request.last else ())


def _shares(costs: Costs, sizes: Mapping[int, int]) -> dict[int, Timing | None]:
    """Times one machine's update by number of samples: medians of rounds in turns, because the load varies.

    Shares that there is no time for lie on a straight line. `sizes`: how many share the job's batch, by the samples
    that each then has.
    """
    began_s = time.monotonic()
    points: dict[int, list[Timing]] = {}
    for samples, count in sorted(sizes.items()):
        least = max(points, default=0)
        # Once to warm up, and once to be timed.
        expected_s = 2 * samples * points[least][0].seconds / least if least else 0.0
        if time.monotonic() - began_s + expected_s > _BUDGET_S:
            break
        if (timed := costs.share(count, _EACH_S)) is None:
            return dict.fromkeys(sizes)
        points[samples] = [timed]
    round_s = time.monotonic() - began_s
    for number in range(1, _ROUNDS):
        if (number + 1) * round_s > _BUDGET_S:
            break
        for samples, taken in points.items():
            taken.append(costs.share(sizes[samples], _EACH_S) or taken[0])
    known = [(samples, _middle(taken)) for samples, taken in points.items()]
    return {samples: dict(known).get(samples) or _beyond(known, samples) for samples in sizes}


def _middle(taken: Sequence[Timing]) -> Timing:
    seconds = sorted(one.seconds for one in taken)
    middle = statistics.median(seconds)
    return Timing(middle, max((seconds[-1] - seconds[0]) / middle, *(one.spread for one in taken)))


def _beyond(points: Sequence[tuple[int, Timing]], samples: int) -> Timing:
    """Returns the line through the last two points, or through zero and the only one."""
    few, shorter = points[-2] if len(points) > 1 else (0, Timing(0.0))
    many, longer = points[-1]
    slope = max(0.0, longer.seconds - shorter.seconds) / (many - few)
    return Timing(longer.seconds + slope * (samples - many), longer.spread)


def _rows(case: JobCase, costs: Costs, shares: dict[int, Timing | None]) -> list[dict[str, Any]]:
    model, graph = case.described()
    link, pass_s = costs.worked(case.between or WITHIN_A_MACHINE), costs.pass_s(model)
    times = OpTimes(case.here, 0.0, rates=case.rates)
    rows: list[dict[str, Any]] = []

    def links(mesh: Mesh) -> LinkSpeeds:
        return links_of(mesh, per_machine=1, between=link)

    batch, samples = case.network["batch"], case.network["samples"]
    group, slots = norm_group(case.job, batch), slots_of(case.job.train)
    for count, share in shares.items():
        search = SearchRequest(count, batch, norm_group=group, slots=slots, accelerator=case.device != "cpu")
        option = price(graph, search, times, links, share)
        on_all = with_processes(case.job, count)
        sync = plan_sync(on_all, case.network, option, links, model=model, link=link, pass_s=pass_s)
        seconds = sync_seconds(sync) or option.prediction.seconds
        epoch_s = samples * seconds / batch
        rows.append(
            {
                "processes": count,
                "batch": batch,
                "samples": -(-batch // count),
                "step_ms": round(seconds * 1e3, 3),
                "compute_ms": round(option.prediction.compute_seconds * 1e3, 3),
                "sync": sync_words(taken) if (taken := sync_taken(sync)) else EXACT,
                "images_per_s": batch / seconds,
                "epoch_s": epoch_s,
                "process_hours": count * epoch_s / _HOUR_S,
            }
        )
    least = rows[0]["images_per_s"] / rows[0]["processes"]
    return [row | {"efficiency": row["images_per_s"] / row["processes"] / least} for row in rows]
