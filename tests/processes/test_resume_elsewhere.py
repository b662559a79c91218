"""A run that goes on at another number of processes makes the same global batches, and the same updates."""

from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.run_folder import RunFolder
from manyhands.train.build import build
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.train.saving import finish_save, save
from tests.processes.ranks import run_on_ranks

# Four steps an epoch; the stop lies within the second one.
SAMPLES, BATCH, STOP, LAST = 103, 29, 6, 14


def _train(world, folder, until):
    """From the folder's checkpoint, if it has one, to a step; each step's own samples and loss."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5))
    mode = "single" if world.alone else "data"
    flags = {
        "data.name": f"synthetic:{SAMPLES}x1x8x8x5", "data.augment": "crop-flip", "model.num_classes": 5,
        "train.batch": BATCH, "train.epochs": 9,
        "train.precision": "fp64", "train.channels_last": False, "train.norm_group": 4,
    }  # fmt: skip
    trainer = build(
        Parts.from_job(load_job(flags, environment={}).job, RunFolder(Path(folder)), world, mode, Objects(network))
    )
    seen, losses = {}, {}
    while trainer.progress.step < until:
        for update in trainer.feed.updates(trainer.progress.epoch, trainer.progress.step_in_epoch):
            step = trainer.progress.step
            seen[step] = [part.samples[: part.share.count].tolist() for part in update]
            trainer.updater(update, step)
            losses[step] = trainer.updater.measured.take()[0]
            trainer.progress.advance(trainer.feed.order.steps_per_epoch)
            if trainer.progress.step == until:
                break
    save(trainer)
    finish_save(trainer)
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    trainer.resources.close()
    return seen, losses, weights


def _together(results):
    """Global batches, in the order of the passes and ranks, and losses over all processes."""
    steps = results[0][0]
    batches = {step: [sample for each in zip(*(r[0][step] for r in results), strict=True) for part in each
                      for sample in part] for step in steps}  # fmt: skip
    return batches, {step: sum(r[1][step] for r in results) for step in steps}


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_the_same_global_batches_at_another_number(before, after, tmp_path):
    whole, first = tmp_path / "whole", tmp_path / "run"
    wanted = run_on_ranks(_train, 1, str(whole), LAST)
    wanted_batches, wanted_losses = _together(wanted)
    run_on_ranks(_train, before, str(first), STOP)
    results = run_on_ranks(_train, after, str(first), LAST)
    batches, losses = _together(results)
    assert list(batches) == list(range(STOP, LAST))
    for step, samples in batches.items():
        assert samples == wanted_batches[step]
        assert losses[step] == pytest.approx(wanted_losses[step], rel=1e-9)
    for name, tensor in wanted[0][2].items():
        for result in results:
            torch.testing.assert_close(result[2][name], tensor, rtol=1e-9, atol=1e-12)
