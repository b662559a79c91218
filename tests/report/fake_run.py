"""Makes records and run folders as a training run would leave them."""

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from manyhands.config.job import Job
from manyhands.core import records
from manyhands.core.phases import PHASES
from manyhands.core.run_folder import RunFolder

START = 1_795_000_000.0
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def step_record(step, time=1.0, **more):
    """Of one update among a thousand, in epochs of ten."""
    usual = {"epoch": step // 10, "step_in_epoch": step % 10, "steps_per_epoch": 10, "total_steps": 1000, "loss": 1.0,
             "top1": 0.5, "learning_rate": 0.1, "images_per_s": 100, "samples": 8}  # fmt: skip
    return records.StepMetrics(**{"time": time, "step": step, **usual, **more})


@dataclass
class FakeRun:
    """A run that never trained: curves by formula, noise by seed."""

    path: Path
    classes: list[str] = field(default_factory=lambda: list(DIGITS))
    epochs: int = 30
    steps_per_epoch: int = 100
    record_every: int = 10
    seed: int = 0
    time: float = START

    def __post_init__(self):
        self.folder = RunFolder(self.path)
        self.random = random.Random(self.seed)
        self.best = 0.0
        self.saved = 0

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
        self.time += self.record_every * (0.07 if self.random.random() < 0.95 else 0.2)
        part = step / (self.epochs * self.steps_per_epoch)
        noise = self.random.gauss(0, 0.08)
        record = step_record(
            step,
            self.time,
            epoch=step // self.steps_per_epoch,
            step_in_epoch=step % self.steps_per_epoch,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.epochs * self.steps_per_epoch,
            loss=2.2 * math.exp(-3 * part) + 0.15 + abs(noise) * 1.2,
            top1=max(0.0, min(1.0, 0.95 - 0.8 * math.exp(-4 * part) + noise / 2)),
            learning_rate=0.1 * min(1, part * 20) * (0.5 + 0.5 * math.cos(math.pi * part)),
            images_per_s=1840 + self.random.gauss(0, 60) - (600 if self.random.random() < 0.03 else 0),
            samples=self.record_every * 128,
            data_share=max(0.0, self.random.gauss(0.15, 0.04)),
            saved_step=self.saved,
            **more,
        )
        records.append(self.folder.metrics, record)

    def save(self, step):
        self.saved = step
        self.event("saved", step=step, message=f"checkpoints/step-{step:08d}")

    def evaluate(self, step):
        """One evaluation with its counts."""
        self.time += 1.5
        part = step / (self.epochs * self.steps_per_epoch)
        right = 0.93 - 0.75 * math.exp(-4.5 * part)
        detail = self.detail(step, right)
        best = detail.top1 > self.best
        self.best = max(self.best, detail.top1)
        figures = {name: getattr(detail, name) for name in ("time", "epoch", "step", "count", "loss", "top1", "top5")}
        records.append(self.folder.metrics, records.EvaluationMetrics(**figures, best=best, seconds=1.5))
        records.write_json(self.folder.evaluations / "last.json", detail)
        if best:
            records.write_json(self.folder.evaluations / "best.json", detail)

    def detail(self, step, right, each=40):
        counts, number = Counter(), len(self.classes)
        for true in range(number):
            ease = right - 0.25 * ((true * 7) % 10 == 3) + 0.02 * ((true * 3) % 5)
            for _ in range(each):
                near = (true + self.random.choice([1, 1, 1, -1, 5])) % number
                counts[true, true if self.random.random() < ease else near] += 1
        total = number * each
        hits = sum(counts[true, true] for true in range(number))
        return records.EvaluationDetail(
            time=self.time,
            epoch=step // self.steps_per_epoch,
            step=step,
            count=total,
            top1=hits / total,
            top5=min(1.0, hits / total + 0.06),
            loss=1.9 * (1 - hits / total) + 0.1,
            classes=self.classes,
            confusion=[(true, guess, count) for (true, guess), count in sorted(counts.items())],
        )

    def train(self, first=0, last=None):
        """Steps, evaluations and saves after update `first` up to `last`."""
        last = self.epochs * self.steps_per_epoch if last is None else last
        for step in range(first + 1, last + 1):
            if step % self.record_every == 0 or step == last:
                self.step(step)
            if step % self.steps_per_epoch == 0:
                self.evaluate(step)
                self.save(step)
                self.tell(step)
        return self

    def tell(self, step):
        """What the two processes spent the epoch on."""
        shares = {"data": 1.1, "compute": 4.2, "communication": 0.9, "update": 0.4, "evaluation": 1.5, "saving": 0.1}
        seconds = {phase: [self.random.gauss(shares.get(phase, 0.02), 0.01) for _ in range(2)] for phase in PHASES}
        epoch = step // self.steps_per_epoch
        records.append(
            self.folder.metrics, records.PhaseMetrics(time=self.time, epoch=epoch, step=step, seconds=seconds)
        )

    def resume(self, step, pause=3600.0):
        self.time += pause
        self.event("resumed", step=step, message=f"went on from step {step} with 2 processes")
        return self

    def finish(self):
        self.time += 1
        self.event("finished", step=self.epochs * self.steps_per_epoch)
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
    run = FakeRun(path, **settings).begin()
    total = run.epochs * run.steps_per_epoch
    run.train(0, total * 45 // 100)
    run.event("warning", message="n2 waits 34 % of its time for data: raise data.workers", step=total * 45 // 100)
    run.resume(total * 40 // 100 // run.steps_per_epoch * run.steps_per_epoch)
    run.train(total * 40 // 100 // run.steps_per_epoch * run.steps_per_epoch)
    return run.finish()
