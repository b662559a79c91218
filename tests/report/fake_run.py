"""Makes records and run folders as a training run would leave them."""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from manyhands.config.job import Job
from manyhands.core import records
from manyhands.core.phases import PHASES
from manyhands.core.run_folder import RunFolder


def step_record(step, time=1.0, **more):
    """Of one update among a thousand, in epochs of ten."""
    usual = {"epoch": step // 10, "step_in_epoch": step % 10, "steps_per_epoch": 10, "total_steps": 1000, "loss": 1.0,
             "top1": 0.5, "learning_rate": 0.1, "images_per_s": 100, "samples": 8}  # fmt: skip
    return records.StepMetrics(**{"time": time, "step": step, **usual, **more})


@dataclass
class FakeRun:
    """A run that never trained: its curves are formulas."""

    path: Path
    classes: list[str] = field(default_factory="zero one two three four five six seven eight nine".split)
    epochs: int = 30
    steps_per_epoch: int = 100
    record_every: int = 10
    time: float = 1_795_000_000.0
    best: float = 0.0
    saved: int = 0

    def __post_init__(self):
        self.folder = RunFolder(self.path)
        self.steps = self.epochs * self.steps_per_epoch

    def begin(self, **train):
        """job.toml, env.json, plan.json and the first event."""
        self.path.mkdir(parents=True, exist_ok=True)
        job = Job.model_validate(
            {"data": {"name": "cifar10"}, "model": {"name": "resnet18"}, "train": {"epochs": self.epochs, **train}}
        )
        self.folder.job.write_text(tomli_w.dumps(job.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
        hosts = [{"name": name, "devices": ["NVIDIA H200"]} for name in ("n1", "n2")]
        software = {"python": "3.11.7", "torch": "2.15.0", "git": {"revision": "4ed6c3a", "dirty": False}}
        records.write_json(self.folder.environment, {**software, "hosts": hosts})
        plan = {"mode": "data", "processes": 2, "device": "cuda", "micro_batch": 64, "accumulate": 1}
        exceptions = ["norm_group = local: the result depends on the number of processes."]
        records.write_json(self.folder.plan, {**plan, "exceptions": exceptions})
        self.event("started", message="2 processes on n1, n2")
        return self

    def event(self, kind, *, message="", step=None, **data):
        records.append(
            self.folder.events, records.Event(time=self.time, kind=kind, message=message, step=step, data=data)
        )

    def step(self, step, **more):
        """One step record; time passes by."""
        self.time += self.record_every * 0.07
        part, (epoch, step_in_epoch) = step / self.steps, divmod(step, self.steps_per_epoch)
        figures = {
            "epoch": epoch, "step_in_epoch": step_in_epoch, "steps_per_epoch": self.steps_per_epoch,
            "total_steps": self.steps, "loss": 2.2 * math.exp(-3 * part), "top1": 0.95 - 0.8 * math.exp(-4 * part),
            "learning_rate": 0.1 * min(1, part * 20) * (0.5 + 0.5 * math.cos(math.pi * part)),
            "images_per_s": 1800 + step % 130, "samples": self.record_every * 128, "data_share": 0.15,
            "saved_step": self.saved,
        }  # fmt: skip
        records.append(self.folder.metrics, step_record(step, self.time, **figures, **more))

    def save(self, step):
        self.saved = step
        self.event("saved", step=step, message=f"checkpoints/step-{step:08d}")

    def evaluate(self, step, each=40):
        """One evaluation with its counts: some of each class pass for the next one. The last isn't the best."""
        self.time += 1.5
        counts, number = Counter(), len(self.classes)
        for true in range(number):
            right = 0.93 - 0.75 * math.exp(-4.5 * step / self.steps) - 0.02 * (true % 5) - 0.05 * (step == self.steps)
            counts[true, true] += (hits := round(each * right))
            counts[true, (true + 1) % number] += each - hits
        top1 = sum(counts[true, true] for true in range(number)) / (each * number)
        figures = {"time": self.time, "epoch": step // self.steps_per_epoch, "step": step, "count": each * number,
                   "top1": top1, "top5": min(1.0, top1 + 0.06), "loss": 2 - 1.9 * top1}  # fmt: skip
        confusion = [(*cell, count) for cell, count in sorted(counts.items()) if count]
        detail = records.EvaluationDetail(**figures, classes=self.classes, confusion=confusion)
        best, self.best = top1 > self.best, max(top1, self.best)
        records.append(self.folder.metrics, records.EvaluationMetrics(**figures, best=best, seconds=1.5))
        for name in ("last", "best")[: 1 + best]:
            records.write_json(self.folder.evaluations / f"{name}.json", detail)

    def train(self, first=0, last=None):
        """Steps, evaluations, saves and times of phases after update `first` up to `last`."""
        last = self.steps if last is None else last
        for step in range(first + 1, last + 1):
            if step % self.record_every == 0 or step == last:
                self.step(step)
            if step % self.steps_per_epoch == 0:
                self.evaluate(step)
                self.save(step)
                seconds = {phase: [number, number + 0.1] for number, phase in enumerate(PHASES)}
                times = {"epoch": step // self.steps_per_epoch, "step": step, "seconds": seconds}
                records.append(self.folder.metrics, records.PhaseMetrics(time=self.time, **times))
        return self

    def resume(self, step, pause=3600.0):
        self.time += pause
        self.event("resumed", step=step, message=f"went on from step {step} with 2 processes")
        return self

    def finish(self):
        self.time += 1
        self.event("finished", step=self.steps)
        return self

    def fail(self, rank=1, *, consequence=False, step=None):
        self.time += 1
        failure = records.Failure(
            time=self.time, rank=rank, host="n2", pid=4121, step=step, phase="train", error="OutOfMemoryError",
            what="n2's GPU 0 is full at 128 images (23.1 of 24 GB)", where="rank 1, step 1234",
            hints=["--set train.micro_batch=96; the global batch stays 256"], consequence=consequence,
            traceback='Traceback (most recent call last):\n  File "net.py", line 12, in forward\nOutOfMemoryError',
        )  # fmt: skip
        records.write_json(self.folder.failures / f"{rank}.json", failure)
        return self


def complete(path, **settings):
    """A run with everything: a crash and a resume, a warning, a finish."""
    run = FakeRun(path, epochs=10, **settings).begin().train(0, 450)
    run.event("warning", message="n2 waits 34 % of its time for data: raise data.workers", step=450)
    return run.resume(400).train(400).finish()
