"""The mode auto: data parallel is the very same objects, a split trains the same, and a run keeps its plan."""

import json

import pytest
import torch
from torch import nn

from tests.processes.ranks import run_on_ranks
from tests.processes.test_parity import assert_same_saved, train_and_save
from tests.processes.updates import EXACT, assert_alike, built, make_updates

AUTO = {"parallel.mode": "auto", "parallel.measure": False}
# Less than the whole network takes, so that its layers must be split; without it they need not.
TIGHT = {**AUTO, "parallel.memory": "3MiB"}


def _heavy():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 5))


def _light():
    """Much work for few weights: nothing is gained by splitting them."""
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)),
    )


def _structure(world, folder, mode):
    """All that could tell two modes apart, as plain data, and the weights after some updates."""
    torch.manual_seed(3)
    flags = {
        "data.name": "synthetic:103x1x8x8x5", "train.batch": 29, "train.epochs": 50, **EXACT, **AUTO,
        "parallel.mode": mode,
    }  # fmt: skip
    with built(world, _light(), flags, folder, as_worker=True) as trainer:
        network, updater, feed = trainer.network, trainer.updater, trainer.feed
        modules, parameters = network.call.named_modules(), network.call.named_parameters()
        found = {
            "classes": [type(one).__qualname__ for one in (network, network.call, feed, updater, updater.optimizer)],
            "postpone_steps": network.traits.no_sync.__qualname__,
            "mode": trainer.run.mode,
            "layouts": dict(network.layouts),
            "modules": {name: _module(module) for name, module in modules},
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
    auto, data = (run_on_ranks(_structure, 2, tmp_path / mode, mode) for mode in ("auto", "data"))
    plan = json.loads((tmp_path / "auto" / "plan.json").read_text())
    assert plan["mode"] == "data"
    assert "data parallel is kept" in plan["reason"]
    for (found, weights), (wanted, expected) in zip(auto, data, strict=True):
        assert not found["layouts"]
        assert found["classes"][0] == "FlatNetwork"
        for part, content in wanted.items():
            assert found[part] == content, part
        assert_alike(weights, expected)


def _train(world, folder, until, *cases):
    """Losses, checkpoint, evaluation and layouts of each case."""
    return [train_and_save(world, _heavy, until, case, folder / str(n), as_worker=True) for n, case in enumerate(cases)]


def _alone(folder, until):
    return run_on_ranks(_train, 1, folder / "alone", until, {"parallel.mode": "single"})[0][0][1]


def test_auto_trains_to_the_weights_of_one_process(tmp_path):
    """By predicted costs, and by measured ones."""
    cases = TIGHT, {**TIGHT, "parallel.measure": True}
    saved = _alone(tmp_path, 6)
    for number, found in enumerate(run_on_ranks(_train, 3, tmp_path, 6, *cases)[0]):
        assert any(layout.cuts for layout in found[3].values())
        assert json.loads((tmp_path / str(number) / "plan.json").read_text())["mode"] == "auto"
        assert_same_saved(found[1], saved)


@pytest.mark.slow
def test_a_run_that_resumes_keeps_its_plan_for_the_same_request(tmp_path):
    saved, file = _alone(tmp_path, 7), tmp_path / "0" / "plan.json"
    begun = run_on_ranks(_train, 2, tmp_path, 4, TIGHT)[0][0]
    # A search would find a reason of its own.
    file.write_text(json.dumps({**json.loads(file.read_text()), "reason": "this plan was kept"}))
    resumed = run_on_ranks(_train, 2, tmp_path, 7, {**TIGHT, "checkpoint.resume": "auto"})[0][0]
    assert json.loads(file.read_text())["reason"] == "this plan was kept"
    assert resumed[3] == begun[3]
    assert_same_saved(resumed[1], saved)
    # Where sending is all that costs, every process computes everything.
    other = {**AUTO, "parallel.link": "1mbit", "checkpoint.resume": "auto"}
    changed = run_on_ranks(_train, 2, tmp_path, 8, other)[0][0]
    assert json.loads(file.read_text())["reason"] != "this plan was kept"
    assert changed[3] != begun[3]


def test_semi_with_a_search_respects_pins(tmp_path):
    settings = {**TIGHT, "parallel.mode": "semi", "parallel.fill": "search"}
    pinned = [{**settings, "parallel.pin": (f"1={letter}@dp",)} for letter in "ni"]
    free, *others = run_on_ranks(_train, 2, tmp_path, 6, settings, *pinned)[0]
    assert free[3]["1.weight"].cuts == ((0, (0,)),)
    for found, cuts in zip(others, ((), ((1, (0,)),)), strict=True):
        assert found[3]["1.weight"].cuts == cuts
        # What isn't pinned is searched: the large layer must be split to fit.
        assert found[3]["3.weight"].cuts
    saved = _alone(tmp_path, 6)
    for found in (free, *others):
        assert_same_saved(found[1], saved)


def _overflows(world):
    """fp16 with a layer in pieces: whether an update changed nothing, and the scale after it, for each update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 6))
    flags = {
        "data.name": "synthetic:40x1x8x8x6", "train.batch": 8, "train.precision": "fp16", "parallel.mode": "semi",
        "parallel.pin": ("1=o@dp",),
    }  # fmt: skip
    with built(world, model, flags) as trainer:
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
