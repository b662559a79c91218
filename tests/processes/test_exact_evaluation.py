"""Each sample counts once on any number of processes, to the last bit; a stop comes to all at the same block."""

import pytest
import torch
from torch import nn

from manyhands.core.world import World
from manyhands.train import evaluate
from manyhands.train.objects import metric_names
from manyhands.train.status import count_collectives, count_network_bytes
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import built, normed

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


def _evaluate(world, *cases):
    """For each case: count, loss, shares of right guesses, metrics; the confusion; calls of the network, also of one
    that rank 1 of two stops after four; collectives and bytes that an evaluation takes."""
    found = []
    for settings in cases:
        network = normed()
        flags = {"data.name": f"synthetic:{5 * COUNT}x1x8x8x5", "model.num_classes": 5}
        with built(world, network, {**flags, "train.metrics": metric_names(METRICS), **settings}, metrics=METRICS) as t:
            before = count_collectives(), count_network_bytes()
            one, calls = t.evaluate(), []
            took = count_collectives() - before[0], count_network_bytes() - before[1]
            # Once more, where a stop may be asked for: what is asked when, and how often, decides nothing.
            network.register_forward_hook(lambda *_, calls=calls: calls.append(0))
            again, made = t.evaluate(lambda: False), len(calls)
            if world.size == 2:
                evaluate.ASK_S = 1e-9
                with pytest.raises(evaluate.Interrupted):
                    t.evaluate(lambda made=made, calls=calls: world.rank == 1 and len(calls) == made + 4)
        assert (again.loss, again.count, again.metrics) == (one.loss, one.count, one.metrics)
        found.append(
            ((one.count, one.loss, one.top1, one.top5, one.metrics), one.confusion, made, len(calls) - made, took)
        )
    return found


FSDP = {"parallel.mode": "fsdp"}


def _shares(*shares):
    return {"train.batch": 64, "cluster.shares": shares}


# By number of processes: how they evaluate, and how often each calls the network.
CASES = {
    2: [({}, None), (_shares(48, 16), (30, 10)), ({**_shares(48, 16), **FSDP}, (20, 20))],
    3: [
        ({}, None),
        (FSDP, None),
        ({**_shares(16, 1, 47), "train.evaluate_views": 2}, (20, 0, 60)),
        # Fewer blocks than processes, and a slow one first.
        ({**_shares(2, 31, 31), "train.evaluate_batch": 6000}, (0, 1, 1)),
    ],
}


@pytest.mark.parametrize("size", CASES)
def test_several_processes_count_as_one_does(size):
    """Also where who takes more of an update evaluates more; those that must call equally often do."""
    settings = [case for case, _ in CASES[size]]
    alone = [{key: one for key, one in case.items() if key.startswith("train.evaluate")} for case in settings]
    wanted = _evaluate(World(), *alone)
    ranks = run_on_ranks(_evaluate, size, *settings)
    for (case, calls), (figures, confusion, *_), *found in zip(CASES[size], wanted, *ranks, strict=True):
        for one in found:
            assert one[0] == figures
            assert torch.equal(one[1], confusion)
        assert calls in (None, tuple(one[2] for one in found))
        for *_, made, till_stop, (collectives, moved) in found:
            # The same part of the blocks of all.
            assert size > 2 or till_stop == 4 * made // found[1][2]
            assert collectives == 3 or "parallel.mode" in case  # FSDP also gathers weights
            # Where the system tells: labels and guesses at least.
            assert moved == 0 or moved > 2 * 8 * COUNT
    count, loss, top1, top5, metrics = wanted[0][0]
    assert count == int(wanted[0][1].sum()) == COUNT
    assert metrics["custom_loss"] == pytest.approx(loss, rel=1e-6)
    assert top1 < metrics["third"] < top5
