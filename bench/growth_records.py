"""A run of more and more records, one for each update: their size, and what report and logs take."""

import math
import shutil
import sys
import time
from pathlib import Path

import tomli_w

from bench.growth_planner import timed
from manyhands.config.job import Job
from manyhands.core.folder import RunFolder
from manyhands.core.records import EvaluationMetrics, Event, StepMetrics
from manyhands.report.follow import Follower

SIZES = (1_000, 10_000, 100_000, 1_000_000)
EPOCHS = 100


def measure(steps, scratch):
    folder = RunFolder(Path(scratch) / f"run-{steps}")
    try:
        write(folder, steps)
        found = {
            "metrics_mib": folder.metrics.stat().st_size / 2**20,
            "log_mib": (folder.ranks / "0.log").stat().st_size / 2**20,
        }
        command = [sys.executable, "-m", "manyhands"]
        found["report"] = timed([*command, "report", str(folder.path)])
        found["logs"] = timed([*command, "logs", str(folder.path), "--last", "20"])
        began = time.process_time()
        Follower(folder.path, only_new=True).poll()
        return {**found, "page_mib": folder.report.stat().st_size / 2**20, "live_s": time.process_time() - began}
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


def write(folder, steps):
    """What a run leaves that records each update (run.log_steps, or updates that take half a second)."""
    folder.ranks.mkdir(parents=True)
    folder.job.write_text(tomli_w.dumps(Job().model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    began, each = time.time() - steps, max(1, steps // EPOCHS)
    events = [Event(time=began, kind="started"), Event(time=began + steps, kind="finished", step=steps)]
    folder.events.write_text("".join(event.model_dump_json() + "\n" for event in events), encoding="utf-8")
    with folder.metrics.open("w") as metrics, (folder.ranks / "0.log").open("w") as log:
        for step in range(1, steps + 1):
            metrics.write(step_record(step, steps, each, began).model_dump_json() + "\n")
            if step % each == 0:
                metrics.write(evaluation(step, each, began).model_dump_json() + "\n")
            log.write(
                f"2026-01-01T00:00:00Z rank=0 epoch={step // each + 1} step={step}/{steps} loss=0.1234 acc=98.1\n"
            )


def step_record(step, steps, each, began):
    loss = 0.1 + 2.2 * math.exp(-3 * step / steps) + 0.05 * math.sin(step * 7919)
    return StepMetrics(
        time=began + step, epoch=step // each, step=step, step_in_epoch=step % each, steps_per_epoch=each,
        total_steps=steps, loss=loss, top1=max(0.0, 1 - loss / 3), learning_rate=0.1 * (1 - step / steps),
        images_per_s=1840.0 + step % 97, samples=128, data_share=0.1,
    )  # fmt: skip


def evaluation(step, each, began):
    epoch = step // each
    return EvaluationMetrics(
        time=began + step,
        epoch=epoch,
        step=step,
        count=10_000,
        loss=1 / epoch,
        top1=1 - 0.5 / epoch,
        top5=1.0,
        best=True,
    )
