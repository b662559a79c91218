"""Small networks, and trainers of them under a job, in a process of a group or alone."""

import contextlib
import tempfile
from pathlib import Path

import torch
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.run_folder import RunFolder
from manyhands.parallel.apply import follows_plan
from manyhands.parallel.plan import plan_of
from manyhands.train.build import build
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.train.state import capture
from manyhands.worker.entry import _build

# Divides by nothing: 103 = 3 * 29 + 16.
SAMPLES, BATCH = 103, 29
EXACT = {"train.precision": "fp64", "train.channels_last": False}


def network(norm):
    def block(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 3, padding=1), *([nn.BatchNorm2d(outputs)] if norm else []), nn.ReLU()]

    return nn.Sequential(*block(1, 6), nn.MaxPool2d(2), *block(6, 8), nn.Flatten(), nn.Linear(8 * 16, 5))


class SyncedNetwork(nn.Module):
    """BatchNorm, dropout and a matrix that goes as factors; `idle`: also a frozen layer and one that is never used."""

    def __init__(self, *, idle=False, dropout=0.2):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout),
            nn.Linear(384, 12), nn.Linear(12, 5),
        )  # fmt: skip
        if idle:
            self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)
            self.unused = nn.Linear(2, 2)

    def forward(self, pictures):
        return self.body(pictures)


class Of003(nn.Module):
    """Document 003's network; `times`: how often its sum is collected, once if it is right."""

    def __init__(self, mesh, times=1, mark=True):
        super().__init__()
        self.tp, self.times = mesh.axis("tp"), times
        whole = torch.rand(512, 128)
        self.weight = self.tp.shard(whole, 1) if mark else nn.Parameter(self.tp.shard(whole, 1).detach())

    def forward(self, x):
        x = (x @ self.weight).sum(-1)
        for _ in range(self.times):
            x = self.tp.all_reduce(x)
        return x


@contextlib.contextmanager
def built(world, model, flags, folder="", mode="", *, as_worker=False, **objects):
    """A trainer, which is closed at the end; its records are in the folder, or in one that leaves with it.

    The mode is the job's, or single on one process. `as_worker`: built as `manyhands train` does, which resolves what
    is measured.
    """
    job = load_job({"train.evaluate_every": 0.0, **flags}, environment={}).job
    mode = mode or ("single" if world.alone else "data" if job.parallel.mode == "auto" else job.parallel.mode)
    with tempfile.TemporaryDirectory() as temporary:
        place = RunFolder(Path(folder or temporary))
        place.failures.mkdir(parents=True, exist_ok=True)
        if as_worker:
            trainer = _build(job, place, world, {"live": Objects(model, **objects)})
        else:
            plan = plan_of(job.parallel, world.size) if follows_plan(mode) else None
            trainer = build(Parts.from_job(job, place, world, mode, Objects(model, **objects), plan))
        try:
            yield trainer
        finally:
            trainer.saver.wait()  # before the folder goes
            trainer.resources.close()


def updates(trainer, until):
    """Makes updates up to a step; yields each when it is made."""
    while trainer.progress.step < until:
        for update in trainer.feed.updates(trainer.progress.epoch, trainer.progress.step_in_epoch):
            trainer.updater(update, trainer.progress.step)
            trainer.progress.advance(trainer.feed.order.steps_per_epoch)
            yield update
            if trainer.progress.step == until:
                return


def make_updates(trainer, until):
    """The losses of this process in updates up to a step."""
    return [trainer.updater.measured.take()[0] for _ in updates(trainer, until)]


def captured(trainer):
    """The snapshot of a trainer; of a sharded network rank 0's alone has tensors."""
    return capture(trainer.network, trainer.updater.optimizer, trainer.progress, {})


def assert_alike(found, wanted, tolerance=0.0, least=1e-12):
    """Compares tensors by name: to the bit, or relative to the largest value of each (of `least` at least)."""
    for name, one in wanted.items():
        if not tolerance or not one.numel():
            assert torch.equal(found[name], one), name
            continue
        scale = one.abs().max().item() if one.is_floating_point() else 1
        assert (found[name] - one).abs().max().item() <= tolerance * max(scale, least), name


def train(world, updates, mode, norm, settings):
    """The losses of so many updates, the whole network's tensors after them, and an evaluation's counts and loss."""
    torch.manual_seed(3)
    flags = {
        "data.name": f"synthetic:{SAMPLES}x1x8x8x5", "train.batch": BATCH, "train.epochs": 50, "train.lr": 0.05,
        "parallel.mode": mode, "data.augment": "crop-flip", "model.num_classes": 5, "train.weight_decay": 1e-3,
        **settings,
    }  # fmt: skip
    with built(world, None if "model.name" in settings else network(norm), flags, mode=mode) as trainer:
        losses = make_updates(trainer, updates)
        weights = {name: one.cpu() for name, one in captured(trainer).model.items()}
        evaluation = trainer.evaluate()
    return losses, weights, (evaluation.confusion, evaluation.loss)
