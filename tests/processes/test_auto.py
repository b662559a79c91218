"""The mode auto: data parallel where that is kept, a split trains the same, and a run keeps its plan."""

import json

import pytest
import torch
from torch import nn

from manyhands.core.world import World
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import EXACT, SMALL, assert_alike, built, train, trained

AUTO = {"parallel.mode": "auto", "parallel.measure": False}
# Less than the whole network takes, so that its layers must be split; without it they need not.
TIGHT = {**AUTO, "parallel.memory": "3MiB"}


def _heavy():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 5))


def _light():
    """Much work for few weights: nothing is gained by splitting them."""
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)),
    )


def _case(folder, until, flags):
    return until, _heavy, {**EXACT, "checkpoint.every": "4steps", **flags}, folder, (), True


def _record(folder):
    return json.loads((folder / "plan.json").read_text())


def test_auto_that_keeps_data_parallel_is_data_parallel(tmp_path):
    ways = [(5, _light, {**EXACT, **AUTO, "parallel.mode": way}, tmp_path / way, (), True) for way in ("auto", "data")]
    for auto, data in zip(*trained(2, ways), strict=True):
        assert (auto.layouts, auto.averages) == ({}, data.averages)
        assert_alike(auto.model, data.model)
        assert_alike(auto.optimizer, data.optimizer)
    record = _record(tmp_path / "auto")
    assert record["mode"] == "data"
    assert "data parallel is kept" in record["reason"]


def test_auto_and_semi_with_a_search_train_to_the_weights_of_one_process(tmp_path):
    """By predicted costs, and by measured ones; pins are respected."""
    semi = {**TIGHT, "parallel.mode": "semi", "parallel.fill": "search"}
    cases = [
        TIGHT,
        {**TIGHT, "parallel.measure": True},
        semi,
        *({**semi, "parallel.pin": (f"1={one}@dp",)} for one in "ni"),
    ]
    alone = train(World(), *_case("", 6, {}))
    ranks = trained(2, [_case(tmp_path / str(number), 6, case) for number, case in enumerate(cases)])
    cuts = [[found.layouts[name].cuts for name in ("1.weight", "3.weight")] for found, _ in ranks]
    assert [_record(tmp_path / str(number))["mode"] for number in range(2)] == ["auto"] * 2
    # What isn't pinned is searched: the large layer must be split to fit.
    assert all(large for _, large in cuts)
    assert [small for small, _ in cuts[2:]] == [((0, (0,)),), (), ((1, (0,)),)]
    for found, _ in ranks:
        assert_alike(found.model, alone.model, 1e-9)
        assert_alike(found.optimizer, alone.optimizer, 1e-9, least=1e-6)


@pytest.mark.slow
def test_a_run_that_resumes_keeps_its_plan_for_the_same_request(tmp_path):
    def run(until, flags):
        ((found, _),) = trained(2, [_case(tmp_path, until, flags)])
        return found, _record(tmp_path)

    begun, record = run(0, {**TIGHT, "train.max_steps": 4})
    # A search would find a reason of its own.
    (tmp_path / "plan.json").write_text(json.dumps({**record, "reason": "this plan was kept"}))
    resumed, record = run(0, {**TIGHT, "train.max_steps": 7})
    assert record["reason"] == "this plan was kept"
    assert (resumed.first, resumed.layouts) == (4, begun.layouts)
    # Where sending is all that costs, every process computes everything.
    changed, record = run(0, {**AUTO, "parallel.link": "1mbit", "train.max_steps": 8})
    assert record["reason"] != "this plan was kept"
    assert changed.layouts != begun.layouts


def _overflows(world):
    """fp16 with a layer in pieces: whether an update changed nothing, and the scale after it, for each update."""
    flags = {**SMALL, "train.precision": "fp16", "parallel.mode": "semi", "parallel.pin": ("1=o@dp",)}
    with built(world, _heavy(), flags) as trainer:
        updater, kept, scales = trainer.updater, [], []
        for step, update in enumerate(trainer.feed.updates(0, 0)):
            before = [one.detach().clone() for one in updater.parameters]
            if world.rank == 1:
                updater.synchronizer.on_gradients = lambda step=step: (
                    updater.parameters[0].grad.fill_(float("inf")) if step == 2 else None
                )
            updater(update, step)
            kept.append(all(torch.equal(*pair) for pair in zip(before, updater.parameters, strict=True)))
            scales.append(updater.gradients.scaler.get_scale())
    return kept, scales


def test_an_overflow_in_one_processs_piece_is_skipped_by_all():
    for kept, scales in run_on_ranks(_overflows, 2):
        assert kept[2]
        assert not kept[3]
        assert scales[2] == scales[1] / 2
