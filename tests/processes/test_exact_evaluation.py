"""Each sample counts once on any number of processes, and the result is the same to the last bit."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.run_folder import RunFolder
from manyhands.train import evaluate
from manyhands.train.build import build
from manyhands.train.objects import Objects, metric_words
from manyhands.train.parts import Parts
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


METRICS = {"third": _top3, "custom_loss": _own_loss, "spread": _Spread()}


def _evaluate(world, mode, settings=None):
    torch.manual_seed(5)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 7))
    flags = {"data.name": f"synthetic:{5 * COUNT}x1x6x6x7", "parallel.mode": mode, "model.num_classes": 7}
    flags |= {"train.metrics": metric_words(METRICS), **(settings or {})}
    job = load_job(flags, environment={}).job
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(Parts.from_job(job, RunFolder(Path(folder)), world, mode, Objects(network, metrics=METRICS)))
        found, calls = trainer.evaluate(), []
        # Once more, where a stop may be asked for: what is asked when, and how often, decides nothing.
        network.register_forward_hook(lambda *_: calls.append(0))
        again = trainer.evaluate(lambda: False)
        assert (again.loss, again.count, again.metrics) == (found.loss, found.count, found.metrics)
        trainer.resources.close()
    return found.count, found.loss, found.top1, found.top5, found.metrics, found.confusion, len(calls)


@pytest.mark.parametrize(("size", "mode"), [(2, "data"), (3, "data"), (3, "fsdp")])
def test_several_processes_count_as_one_does(size, mode):
    (wanted,) = run_on_ranks(_evaluate, 1, "single")
    assert wanted[0] == COUNT
    assert int(wanted[5].sum()) == COUNT
    for found in run_on_ranks(_evaluate, size, mode):
        assert torch.equal(found[5], wanted[5])
        assert found[:5] == wanted[:5]
    assert wanted[4]["custom_loss"] == pytest.approx(wanted[1], rel=1e-6)
    assert wanted[2] < wanted[4]["third"] < wanted[3]


@pytest.mark.parametrize(
    ("shares", "mode", "settings", "calls"),
    [
        ((48, 16), "data", {}, (30, 10)),
        ((16, 1, 47), "data", {"train.evaluate_views": 2}, (10, 0, 30)),
        # Fewer blocks than processes, and a slow one first.
        ((2, 31, 31), "data", {"train.evaluate_batch": 6000}, (0, 1, 1)),
        # All call equally often.
        ((48, 16), "fsdp", {}, (20, 20)),
    ],
)
def test_who_takes_more_of_an_update_evaluates_more_and_counts_as_one_does(shares, mode, settings, calls):
    (wanted,) = run_on_ranks(_evaluate, 1, "single", settings)
    found = run_on_ranks(_evaluate, len(shares), mode, {**settings, "train.batch": 64, "cluster.shares": list(shares)})
    for one in found:
        assert torch.equal(one[5], wanted[5])
        assert one[:5] == wanted[:5]
    assert tuple(one[6] // settings.get("train.evaluate_views", 1) for one in found) == calls


def _stopped(world):
    evaluate.ASK_S = 1e-9
    calls, network = [], nn.Sequential(nn.Flatten(), nn.Linear(36, 7))
    network.register_forward_hook(lambda *_: calls.append(0))
    flags = {"data.name": f"synthetic:{5 * COUNT}x1x6x6x7", "model.num_classes": 7, "train.batch": 64}
    job = load_job({**flags, "cluster.shares": [48, 16]}, environment={}).job
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(Parts.from_job(job, RunFolder(Path(folder)), world, "data", Objects(network)))
        calls.clear()
        with pytest.raises(evaluate.Interrupted):
            trainer.evaluate(lambda: world.rank == 1 and len(calls) == 4)
        trainer.resources.close()
    return len(calls)


def test_a_stop_comes_to_all_at_the_same_part_of_their_blocks():
    assert run_on_ranks(_stopped, 2) == [12, 4]
