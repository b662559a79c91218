"""fp16 under modes that hold a network in pieces: an overflow on one process is everybody's."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.run_folder import RunFolder
from manyhands.train.objects import Objects
from manyhands.worker.entry import _build
from tests.processes.ranks import run_on_ranks


def _overflows(world, mode, pin):
    flags = {
        "data.name": "synthetic:40x1x8x8x6", "train.batch": 8, "train.precision": "fp16", "parallel.mode": mode,
        "parallel.pin": pin, "train.evaluate_every": 0.0, "run.report": False,
    }  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 6))
    with tempfile.TemporaryDirectory() as folder:
        trainer = _build(load_job(flags, environment={}).job, RunFolder(Path(folder)), world, {"live": Objects(model)})
        updater, kept, scales = trainer.updater, [], []
        for step, update in enumerate(trainer.feed.updates(0, 0)):
            before = [one.detach().clone() for one in updater.parameters]
            if world.rank == 1 and step == 2:
                updater.synchronizer.on_gradients = lambda: updater.parameters[0].grad.fill_(float("inf"))
            elif world.rank == 1:
                updater.synchronizer.on_gradients = lambda: None
            updater(update, step)
            kept.append(all(torch.equal(*pair) for pair in zip(before, updater.parameters, strict=True)))
            scales.append(updater.gradients.scaler.get_scale())
        trainer.resources.close()
    return kept, scales


@pytest.mark.parametrize(("mode", "pin"), [("semi", ("1=o@dp",))])
def test_an_overflow_in_one_processs_piece_is_skipped_by_all(mode, pin):
    for kept, scales in run_on_ranks(_overflows, 2, mode, pin):
        assert kept[2]
        assert not kept[3]
        assert scales[2] == scales[1] / 2
