"""Each sample counts once on any number of processes, and the result is the same to the last bit."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.folder import RunFolder
from manyhands.train.data_setup import Objects
from manyhands.train.job import build
from tests.processes.ranks import run_on_ranks

COUNT = 10_007


def _evaluate(world, mode):
    torch.manual_seed(5)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 7))
    flags = {"data.name": f"synthetic:{5 * COUNT}x1x6x6x7", "parallel.mode": mode, "model.num_classes": 7}
    job = load_job(flags, environment={}).job
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(job, RunFolder(Path(folder)), world, mode, Objects(network))
        found = trainer.evaluate()
        trainer.release()
    return found.count, found.loss, found.top1, found.top5, found.confusion


@pytest.mark.parametrize(("size", "mode"), [(3, "data"), (3, "fsdp")])
def test_three_processes_count_as_one_does(size, mode):
    (wanted,) = run_on_ranks(_evaluate, 1, "single")
    assert wanted[0] == COUNT
    assert int(wanted[4].sum()) == COUNT
    for found in run_on_ranks(_evaluate, size, mode):
        assert torch.equal(found[4], wanted[4])
        assert found[:4] == wanted[:4]
