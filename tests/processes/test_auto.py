"""The mode auto: data parallel is the very same objects, a split trains the same, and a run keeps its plan."""

import json

import pytest
import torch
from torch import nn

from manyhands.core.world import World
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import EXACT, SMALL, assert_alike, built, make_updates, train, trained

AUTO = {"parallel.mode": "auto", "parallel.measure": False}
# Less than the whole network takes, so that its layers must be split; without it they need not.
TIGHT = {**AUTO, "parallel.memory": "3MiB"}


def _heavy():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 5))


def _light():
    """Much work for few weights: nothing is gained by splitting them."""
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)),
    )


def _structures(world, folder):
    return [_structure(world, folder / mode, mode) for mode in ("auto", "data")]


def _structure(world, folder, mode):
    """All that could tell two modes apart, as plain data, and the weights after some updates."""
    torch.manual_seed(3)
    flags = {**SMALL, **EXACT, **AUTO, "parallel.mode": mode}
    with built(world, _light(), flags, folder, as_worker=True) as trainer:
        network, updater, feed = trainer.network, trainer.updater, trainer.feed
        parameters = network.call.named_parameters()
        found = {
            "classes": [type(one).__qualname__ for one in (network, network.call, feed, updater, updater.optimizer)],
            "postpone_steps": network.traits.no_sync.__qualname__,
            "mode": trainer.run.mode,
            "layouts": dict(network.layouts),
            "modules": {name: _module(module) for name, module in network.call.named_modules()},
            "hooks": {name: len(one._post_accumulate_grad_hooks or {}) for name, one in parameters},
            "feed": (feed.order, feed.sharing),
        }
        make_updates(trainer, 5)
        return found, {name: one.detach().clone() for name, one in network.model.state_dict().items()}


def _module(module):
    hooks = {
        name: sorted(hook.__qualname__ for hook in hooks.values())
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and hooks
    }
    return f"{type(module).__module__}.{type(module).__qualname__}", hooks, "forward" in vars(module)


def test_auto_that_keeps_data_parallel_runs_the_very_same_objects(tmp_path):
    ranks, plan = run_on_ranks(_structures, 2, tmp_path), _record(tmp_path / "auto")
    assert plan["mode"] == "data"
    assert "data parallel is kept" in plan["reason"]
    for (found, weights), (wanted, expected) in ranks:
        assert not found["layouts"]
        assert found["classes"][0] == "FlatNetwork"
        for part, content in wanted.items():
            assert found[part] == content, part
        assert_alike(weights, expected)


def _case(folder, until, flags):
    return until, _heavy, {**EXACT, "checkpoint.every": "4steps", **flags}, folder, (), True


def _record(folder):
    return json.loads((folder / "plan.json").read_text())


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
