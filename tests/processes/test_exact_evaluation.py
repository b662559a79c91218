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
from manyhands.train.objects import metric_words
from tests.processes.ranks import run_on_ranks

COUNT = 10_007


def _top3(outputs, labels):
    return (outputs.topk(3, 1).indices == labels[:, None]).any(1)


def _own_loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


class _Spread:
    """The variance of outputs, which isn't a mean over samples."""

    def update(self, outputs, labels):
        return torch.stack([torch.tensor(float(outputs.numel())), outputs.sum(), outputs.square().sum()])

    def compute(self, sums):
        count, first, second = sums
        return second / count - (first / count) ** 2


METRICS = {"third": _top3, "own_loss": _own_loss, "spread": _Spread()}


def _evaluate(world, mode):
    torch.manual_seed(5)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 7))
    flags = {"data.name": f"synthetic:{5 * COUNT}x1x6x6x7", "parallel.mode": mode, "model.num_classes": 7}
    flags["train.metrics"] = metric_words(METRICS)
    job = load_job(flags, environment={}).job
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(job, RunFolder(Path(folder)), world, mode, Objects(network, metrics=METRICS))
        found = trainer.evaluate()
        trainer.release()
    return found.count, found.loss, found.top1, found.top5, found.metrics, found.confusion


@pytest.mark.parametrize(("size", "mode"), [(2, "data"), (3, "data"), (3, "fsdp")])
def test_several_processes_count_as_one_does(size, mode):
    (wanted,) = run_on_ranks(_evaluate, 1, "single")
    assert wanted[0] == COUNT
    assert int(wanted[5].sum()) == COUNT
    for found in run_on_ranks(_evaluate, size, mode):
        assert torch.equal(found[5], wanted[5])
        assert found[:5] == wanted[:5]
    assert wanted[4]["own_loss"] == pytest.approx(wanted[1], rel=1e-6)
    assert wanted[2] < wanted[4]["third"] < wanted[3]
