"""The result of a run as lines of text and as an object for --json; formats of numbers and times."""

import math
import statistics
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from manyhands.core import quantities, terminal
from manyhands.core.records import EvaluationDetail, EvaluationMetrics, StepMetrics
from manyhands.core.run_folder import resume_command
from manyhands.report.read import STARTS, RunData

# Kinds of events that end a session, with the status of the run after each.
ENDS = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
FEW_CLASSES = 5  # up to this number of classes, top-5 accuracy is always 100 %
# Shown with the best figure of a run without a held-out set.
CHOSEN = (
    "the best epoch was selected on the evaluation samples; for an independent test, "
    "use --data.held-out FOLDER, or test/ beside train/ and val/"
)


def status(run: RunData) -> str:
    """Returns "finished", "stopped", "failed", or "unfinished" for a run that is active or was killed."""
    word, since = "unfinished", -math.inf
    for event in run.events:
        if event.kind in ENDS and not (word == "finished" and event.data.get("rankless")):
            word, since = ENDS[event.kind], event.time
        elif event.kind in STARTS:
            word, since = "unfinished", event.time
    if any(failure.time >= since for failure in run.failures) and word != "finished":
        return "failed"
    done = bool(run.steps) and run.steps[-1].step >= run.steps[-1].total_steps > 0
    return "finished" if word == "unfinished" and done else word


def best_evaluation(run: RunData) -> EvaluationMetrics | EvaluationDetail | None:
    """Returns the newest evaluation marked as best; for runs of older versions, the one with the highest top-1."""
    measured = [evaluation for evaluation in run.evaluations if math.isfinite(evaluation.top1)]
    noted = [evaluation for evaluation in measured if evaluation.best]
    return noted[-1] if noted else max(measured, key=lambda evaluation: evaluation.top1, default=run.best)


def best_criterion(run: RunData) -> str:
    """Returns the run's option train.best, such as "lowest loss"; empty for top-1, the default."""
    by = run.option("train", "best")
    return terminal.plain(by) if isinstance(by, str) and by != "highest top1" else ""


def bad_pictures(run: RunData) -> list[str]:
    """Returns the names of unreadable pictures that training replaced."""
    return sorted({str(name) for event in run.counted("replaced") for name in event.data.get("pictures", ())})


def final_evaluation(run: RunData) -> EvaluationMetrics | EvaluationDetail | None:
    return run.evaluations[-1] if run.evaluations else run.last


def images_per_s(run: RunData) -> float | None:
    """Returns the median of the step records' images per second, without the first tenth, which includes warm-up."""
    rates = [step.images_per_s for step in run.steps[len(run.steps) // 10 :] if math.isfinite(step.images_per_s)]
    return statistics.median(rates) if rates else None


def count_classes(evaluation: EvaluationMetrics | EvaluationDetail) -> int:
    return evaluation.classes if isinstance(evaluation, EvaluationMetrics) else len(evaluation.classes)


def seconds(run: RunData) -> float:
    """Returns the working time of the run, without pauses between sessions."""
    return sum(session.seconds for session in run.sessions)


def steps_per_epoch(run: RunData) -> int:
    return run.steps[-1].steps_per_epoch if run.steps else 0


def evaluation_name(run: RunData, evaluation: EvaluationMetrics | EvaluationDetail) -> str:
    return epoch_name(evaluation.step, evaluation.epoch, steps_per_epoch(run))


def result_object(run: RunData) -> dict[str, Any]:
    """Returns the result of a run as an object for --json, with null for unknown values and for NaN."""
    best, final, word = best_evaluation(run), final_evaluation(run), status(run)
    counted = [(record.step, record.epoch) for record in (*run.steps[-1:], *run.evaluations[-1:])]
    step, epoch = max(counted, default=(0, 0))

    def finite(evaluation: EvaluationMetrics | EvaluationDetail | None, figure: str = "top1") -> float | None:
        value = getattr(evaluation, figure, math.nan)
        return value if math.isfinite(value) else None

    return {
        "run": str(run.folder.path),
        "best_top1": finite(best),
        "final_top1": finite(final),
        "best_epoch": best.epoch if best else None,
        "final_top5": finite(final, "top5"),
        "final_loss": finite(final, "loss"),
        "best_metrics": best.metrics if best else {},
        "final_metrics": final.metrics if final else {},
        "test_top1": finite(run.tests.get("best")),
        "test_final_top1": finite(run.tests.get("last")),
        "images_per_s": images_per_s(run),
        "steps": step,
        "epochs": epoch,
        "status": "stopped" if word == "unfinished" else word,
        "report": str(run.folder.report) if run.folder.report.is_file() else None,
    }


def result_lines(run: RunData) -> list[str]:
    best, final, speed, word = best_evaluation(run), final_evaluation(run), images_per_s(run), status(run)
    lines: list[str] = []
    if best and final:
        same = best.step == final.step
        by = best_criterion(run) and f" ({best_criterion(run)})"
        lines.append(f"{'best and final' if same else 'best'}{by}  {_format_scores(run, best)}")
        if not same:
            lines.append(f"final {_format_scores(run, final)}")
        lines += [f"test  {_format_scores(run, test)}, the {name} weights" for name, test in run.tests.items()]
        if not run.tests:
            lines.append(CHOSEN)
    else:
        lines.append("no evaluation was made")
    if left_out := run.counted("left-out"):
        lines.append(f"skipped  {len(left_out)} updates with non-finite loss or gradients")
    if bad := bad_pictures(run):
        lines.append(f"replaced  {len(bad)} pictures that could not be read, such as {terminal.plain(bad[0])}")
    ends = {"finished": "finished in", "stopped": "stopped after", "failed": "failed after"}
    took = duration(seconds(run)) + (f", {rate(speed)} images/s" if speed is not None else "")
    lines += [f"{ends.get(word, 'trained for')} {took}", f"run    {run.folder.path}"]
    if run.folder.report.is_file():
        lines.append(f"report {run.folder.report}")
    if word != "finished":
        lines.append(f"to resume: {resume_command(run.folder.path)}")
    return lines


def _format_scores(run: RunData, evaluation: EvaluationMetrics | EvaluationDetail) -> str:
    return (
        f"top-1 {percent(evaluation.top1)}  {top5(evaluation.top5, count_classes(evaluation), 'top-5 {}  ')}"
        f"loss {number(evaluation.loss)}{custom_metrics(evaluation.metrics, '  {} {}')}"
        f"  (epoch {evaluation_name(run, evaluation)})"
    )


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"


def duration(seconds: float) -> str:
    """Formats seconds in at most two units: 8s, 2m05s, 2h11m, 3d04h."""
    if not math.isfinite(seconds):
        return "?"
    rounded = max(0, round(seconds))
    for unit, size, part, part_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if rounded >= size:
            return f"{rounded // size}{unit}{rounded % size // part_size:02d}{part}"
    return f"{rounded}s"


def ago(seconds: float) -> str:
    """Formats seconds in one unit: 12s ago, 2m ago, 3h ago."""
    whole = max(0, int(seconds))
    size, unit = (3600, "h") if whole >= 3600 else (60, "m") if whole >= 60 else (1, "s")
    return f"{whole // size}{unit} ago"


def time_unit(seconds: float) -> tuple[str, float]:
    """Returns (unit, seconds per unit) for a time axis that is `seconds` long."""
    if seconds < 300:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def percent(share: float) -> str:
    return f"{quantities.percentage(share)} %" if math.isfinite(share) else "?"


def top5(share: float, classes: int, form: str) -> str:
    """Formats a top-5 accuracy by `form`, such as "top-5 {}"; "" for 1 to 5 classes. `classes` is 0 if unknown."""
    return form.format(percent(share)) if not 0 < classes <= FEW_CLASSES else ""


def custom_metrics(metrics: Mapping[str, float], form: str) -> str:
    """Formats the user's metrics, name and value, by a `form` such as ", {} {}"."""
    return "".join(form.format(terminal.plain(name), number(value)) for name, value in metrics.items())


def number(value: float) -> str:
    """Formats a number with about four digits: 1840, 93.4, 2.310, 0.00012."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    size = abs(value)
    if size and not 0.01 <= size < 1e7:
        return f"{value:.2g}"
    return f"{value:.3f}" if size < 10 else f"{value:.1f}" if size < 1000 else f"{value:.0f}"


def rate(images_per_s: float) -> str:
    if not math.isfinite(images_per_s):
        return "?"
    return f"{images_per_s:.0f}" if images_per_s >= 100 else f"{images_per_s:.3g}"


def format_utc(time: float) -> str:
    """Formats a time in UTC, such as 2026-11-20T20:01:07Z."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (OverflowError, OSError, ValueError):
        return "?"


def epoch_position(record: StepMetrics) -> tuple[int, int]:
    """Returns the current epoch, counted from 1, and the number of updates made in this epoch."""
    length = record.steps_per_epoch
    ended = record.step_in_epoch >= length and record.step == record.epoch * length
    if ended or (record.step_in_epoch == 0 and record.epoch > 0):
        return record.epoch, length
    return record.epoch + 1, min(record.step_in_epoch, length)


def epoch_name(step: int, epoch: int, steps_per_epoch: int) -> str:
    """Formats the number of epochs trained before an evaluation: 3, or 2.5 within an epoch."""
    if steps_per_epoch <= 0 or step % steps_per_epoch == 0:
        return str(epoch)
    return f"{epoch + (step % steps_per_epoch) / steps_per_epoch:.1f}"
