"""What came out of a run: the lines for people and the object for machines, every number from its records."""

import math
import statistics
from typing import Any

from manyhands.core.records import EvaluationDetail, EvaluationMetrics
from manyhands.core.resuming import resume_command
from manyhands.core.terminal import plain
from manyhands.report.read import STARTS, RunData
from manyhands.report.words import custom_metrics, duration, epoch_name, number, percent, rate, top5

# The kinds of events that end a session, and what they make of the run.
ENDS = {"finished": "finished", "stopped": "stopped", "failed": "failed"}


def status(run: RunData) -> str:
    """Says finished, stopped, failed, or unfinished while it runs (or was killed without a word)."""
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
    """The newest that was the best when it was made; where none was, that with the highest top-1."""
    measured = [evaluation for evaluation in run.evaluations if math.isfinite(evaluation.top1)]
    noted = [evaluation for evaluation in measured if evaluation.best]
    return noted[-1] if noted else max(measured, key=lambda evaluation: evaluation.top1, default=run.best)


def best_by(run: RunData) -> str:
    """What the best evaluation is the best by, where it isn't top-1: "lowest loss"; else nothing."""
    options = run.job.get("train")
    said = options.get("best") if isinstance(options, dict) else None
    return plain(said) if isinstance(said, str) and said != "highest top1" else ""


def bad_pictures(run: RunData) -> list[str]:
    """Those that others took the place of in training."""
    return sorted({str(name) for event in run.counted("replaced") for name in event.data.get("pictures", ())})


def final_evaluation(run: RunData) -> EvaluationMetrics | EvaluationDetail | None:
    return run.evaluations[-1] if run.evaluations else run.last


def images_per_s(run: RunData) -> float | None:
    """The median over the step records, the first tenth left out: it holds the warm-up."""
    rates = [step.images_per_s for step in run.steps[len(run.steps) // 10 :] if math.isfinite(step.images_per_s)]
    return statistics.median(rates) if rates else None


def classes_of(evaluation: EvaluationMetrics | EvaluationDetail) -> int:
    """How many classes a guess is among; 0 where an older record doesn't say."""
    return evaluation.classes if isinstance(evaluation, EvaluationMetrics) else len(evaluation.classes)


def seconds(run: RunData) -> float:
    """How long the run worked, pauses between its sessions left out."""
    return sum(session.seconds for session in run.sessions)


def steps_per_epoch(run: RunData) -> int:
    return run.steps[-1].steps_per_epoch if run.steps else 0


def evaluation_name(run: RunData, evaluation: EvaluationMetrics | EvaluationDetail) -> str:
    return epoch_name(evaluation.step, evaluation.epoch, steps_per_epoch(run))


def result_object(run: RunData) -> dict[str, Any]:
    """The object of --json; null where there is nothing to tell, never NaN."""
    best, final, word = best_evaluation(run), final_evaluation(run), status(run)
    counted = [(record.step, record.epoch) for record in (*run.steps[-1:], *run.evaluations[-1:])]
    step, epoch = max(counted, default=(0, 0))
    return {
        "run": str(run.folder.path),
        "best_top1": _finite(best.top1) if best else None,
        "final_top1": _finite(final.top1) if final else None,
        "best_epoch": best.epoch if best else None,
        "final_top5": _finite(final.top5) if final else None,
        "final_loss": _finite(final.loss) if final else None,
        "best_metrics": best.metrics if best else {},
        "final_metrics": final.metrics if final else {},
        "test_top1": _finite(run.tests["best"].top1) if "best" in run.tests else None,
        "test_final_top1": _finite(run.tests["last"].top1) if "last" in run.tests else None,
        "images_per_s": images_per_s(run),
        "steps": step,
        "epochs": epoch,
        "status": "stopped" if word == "unfinished" else word,
        "report": str(run.folder.report) if run.folder.report.is_file() else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# What is to be known of a best figure where nothing was held out.
CHOSEN = (
    "the best epoch was selected on these samples; for an independent test, "
    "use --data.held-out FOLDER, or test/ beside train/ and val/"
)


def result_lines(run: RunData) -> list[str]:
    best, final, speed = best_evaluation(run), final_evaluation(run), images_per_s(run)
    lines: list[str] = []
    if best and final:
        same = best.step == final.step
        by = best_by(run) and f" ({best_by(run)})"
        lines.append(f"{'best and final' if same else 'best'}{by}  {_scores(run, best)}")
        if not same:
            lines.append(f"final {_scores(run, final)}")
        lines += [f"test  {_scores(run, test)}, the {name} weights" for name, test in run.tests.items()]
        if not run.tests:
            lines.append(CHOSEN)
    else:
        lines.append("no evaluation was made")
    if left_out := run.counted("left-out"):
        lines.append(f"skipped  {len(left_out)} updates with non-finite loss or gradients")
    if bad := bad_pictures(run):
        lines.append(f"replaced  {len(bad)} pictures that could not be read, such as {plain(bad[0])}")
    took = duration(seconds(run)) + (f", {rate(speed)} images/s" if speed is not None else "")
    ends = {"finished": f"finished in {took}", "stopped": f"stopped after {took}", "failed": f"failed after {took}"}
    lines.append(ends.get(status(run), f"trained for {took}"))
    lines.append(f"run    {run.folder.path}")
    if run.folder.report.is_file():
        lines.append(f"report {run.folder.report}")
    if status(run) != "finished":
        lines.append(f"resume {resume_command(run.folder.path)}")
    return lines


def _scores(run: RunData, evaluation: EvaluationMetrics | EvaluationDetail) -> str:
    own = custom_metrics(evaluation.metrics, "  {} {}")
    return (
        f"top-1 {percent(evaluation.top1)}  {top5(evaluation.top5, classes_of(evaluation), 'top-5 {}  ')}"
        f"loss {number(evaluation.loss)}{own}  (epoch {evaluation_name(run, evaluation)})"
    )
