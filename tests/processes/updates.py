"""A small network's updates under a job, in a process of a group or alone."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.run_folder import RunFolder
from manyhands.train.build import build
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.train.state import capture

# Divides by nothing: 103 = 3 * 29 + 16.
SAMPLES, BATCH = 103, 29


def network(norm):
    def block(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 3, padding=1), *([nn.BatchNorm2d(outputs)] if norm else []), nn.ReLU()]

    return nn.Sequential(*block(1, 6), nn.MaxPool2d(2), *block(6, 8), nn.Flatten(), nn.Linear(8 * 16, 5))


def train(world, updates, mode, norm, settings):
    """The losses of so many updates, the whole network's tensors after them, and an evaluation's counts and loss."""
    torch.manual_seed(3)
    flags = {
        "data.name": f"synthetic:{SAMPLES}x1x8x8x5", "train.batch": BATCH,
        "train.epochs": 50, "train.lr": 0.05, "train.evaluate_every": 0.0, "parallel.mode": mode,
        "data.augment": "crop-flip", "model.num_classes": 5, "train.weight_decay": 1e-3,
        **settings,
    }  # fmt: skip
    job = load_job(flags, environment={}).job
    with tempfile.TemporaryDirectory() as folder:
        objects = Objects(None if "model.name" in settings else network(norm))
        trainer = build(Parts.from_job(job, RunFolder(Path(folder)), world, mode, objects))
        losses = []
        while len(losses) < updates:
            for update in trainer.feed.updates(trainer.progress.epoch, trainer.progress.step_in_epoch):
                trainer.updater(update, trainer.progress.step)
                trainer.progress.advance(trainer.feed.order.steps_per_epoch)
                losses.append(trainer.updater.measured.take()[0])
                if len(losses) == updates:
                    break
        snapshot = capture(trainer.network, trainer.updater.optimizer, trainer.progress, {})
        evaluation = trainer.evaluate()
        trainer.resources.close()
    weights = {name: one.cpu() for name, one in snapshot.model.items()}
    return losses, weights, (evaluation.confusion, evaluation.loss)
