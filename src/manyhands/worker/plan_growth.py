"""Predicts how data-parallel training scales with the number of machines."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.planner.find import CandidatePredictor
from manyhands.planner.timing import OpTimes, Timing
from manyhands.sync.link_speeds import LinkSpeed
from manyhands.worker.plan_advice import format_sync_method, job_sync_row, sync_seconds
from manyhands.worker.plan_search import JobCase, case_to_plan, make_links, parse_request

_BUDGET_S, _EACH_S, _ROUNDS = 60.0, 1.0, 3  # seconds for timing all shares of an update, and for each share; rounds


@dataclass(frozen=True)
class Growth:
    """The predicted throughput and cost of training, by number of machines."""

    rows: list[dict[str, Any]]  # JSON data for each number of machines, ascending
    about: dict[str, Any]  # job, device and link, as JSON data
    notes: list[str]  # sentences on omitted or uncertain results

    @property
    def title(self) -> str:
        return f"{self.about['model']} on {self.about['data']}, {self.about['link']} between machines, predicted"

    def as_plain(self) -> dict[str, Any]:
        return {**self.about, "rows": self.rows, "notes": self.notes}


def predict_growth(job: Job, first: int, requested: Mapping[str, Any]) -> Growth:
    """Predicts throughput, efficiency and cost for several numbers of machines with one process each.

    `first` and `requested["world_size"]`: the smallest and largest number of machines. `requested`: see `case_to_plan`.
    Raises UserError if the link speed is missing, or a request can't be satisfied.
    """
    last, case = requested["world_size"], case_to_plan(job, requested)
    if (between := case.between) is None:
        hints = ("set the link speed: --link 1gbit", "or choose one number of processes: -n 4")
        raise UserError("predictions for several numbers of machines need the link speed", "--link", hints)
    batch, notes = case.network["batch"], list[str]()
    if last > batch:
        what, hint = f"train.batch is {batch}, so at most {batch} machines can share an update", f"set --batch {last}"
        if first > batch:
            raise UserError(what, "train.batch", (f"{hint} or higher",))
        notes.append(f"{what}; {hint} or higher")
    case = case.resolved(last)
    most = min(last, batch)
    usual = {3, *(1 << power for power in range(most.bit_length()))} & {*range(first, most)}
    counts = {count: -(-batch // count) for count in sorted({first, most} | usual)}
    timed = _time_updates(case, {samples: count for count, samples in counts.items()})
    rows = _growth_rows(case, {count: timed[samples] for count, samples in counts.items()}, case.with_cpu_time(between))
    about = {
        "model": case.job.model.name,
        "data": case.job.data.name,
        "precision": case.job.train.precision,
        "device": case.device,
        "link": requested["link"] or case.job.sync.link,
        "measured": case.measured,
        "spread": round(max((one.spread for one in timed.values() if one), default=0.0), 3),
    }
    return Growth(rows, about, [*case.notes, *notes])


def _time_updates(case: JobCase, sizes: Mapping[int, int]) -> dict[int, Timing | None]:
    """Times one machine's update for each number of samples per machine, and extrapolates beyond the time limit.

    Each time is the median of interleaved rounds, because the load varies. `sizes`: {samples per machine: number of
    machines}. Returns {samples per machine: time}. All times are None if nothing may be measured.
    """
    began_s, points, least = time.monotonic(), dict[int, list[Timing]](), 0
    for samples, count in sorted(sizes.items()):
        # One pass to warm up, and one to be timed.
        expected_s = 2 * samples * points[least][0].seconds / least if least else 0.0
        if time.monotonic() - began_s + expected_s > _BUDGET_S:
            break
        if (timed := case.timing(count, _EACH_S)) is None:
            return dict.fromkeys(sizes)
        points[samples], least = [timed], samples
    round_s = time.monotonic() - began_s
    for _ in range(1, min(_ROUNDS, int(_BUDGET_S / round_s))):
        for samples, taken in points.items():
            taken.append(case.timing(sizes[samples], _EACH_S) or taken[0])
    known: list[tuple[int, Timing]] = []
    for samples, taken in points.items():
        seconds = [one.seconds for one in taken]
        middle = statistics.median(seconds)
        varied = (max(seconds) - min(seconds)) / middle
        known.append((samples, Timing(middle, max(varied, *(one.spread for one in taken)))))
    return {samples: dict(known).get(samples) or _extrapolate_time(known, samples) for samples in sizes}


def _extrapolate_time(points: Sequence[tuple[int, Timing]], samples: int) -> Timing:
    """Extrapolates linearly from the last two `points` (samples, time of an update), or from the origin and one."""
    few, shorter = points[-2] if len(points) > 1 else (0, Timing(0.0))
    many, longer = points[-1]
    slope = max(0.0, longer.seconds - shorter.seconds) / (many - few)
    return Timing(longer.seconds + slope * (samples - many), longer.spread)


def _growth_rows(case: JobCase, shares: dict[int, Timing | None], link: LinkSpeed) -> list[dict[str, Any]]:
    times, links, rows = OpTimes(case.own_device, 0.0, rates=case.rates), make_links(link, link), list[dict[str, Any]]()
    batch, samples = case.network["batch"], case.network["samples"]
    for count, share in shares.items():
        wanted = parse_request(case.job, batch, case.device, world_size=count)
        option = CandidatePredictor(case.graph, wanted, times, links, share).data_parallel(count)
        sync = case.predict_sync_costs(option, links, link)
        seconds = sync_seconds(sync) or option.prediction.seconds
        epoch_s = samples * seconds / batch
        rows.append(
            {
                "processes": count,
                "batch": batch,
                "samples": -(-batch // count),
                "step_ms": round(seconds * 1e3, 3),
                "compute_ms": round(option.prediction.compute_seconds * 1e3, 3),
                "sync": format_sync_method(job_sync_row(sync)),
                "images_per_s": batch / seconds,
                "epoch_s": epoch_s,
                "process_hours": count * epoch_s / 3600,
            }
        )
    least = rows[0]["images_per_s"] / rows[0]["processes"]
    return [row | {"efficiency": row["images_per_s"] / row["processes"] / least} for row in rows]
