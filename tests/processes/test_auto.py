"""The mode auto: data parallel is the very same objects, a split trains the same, and a run keeps its plan."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.checkpoint.read import load
from manyhands.config.load import load_job
from manyhands.core.run_folder import RunFolder
from manyhands.train.objects import Objects
from manyhands.train.saving import finish_save, save
from manyhands.worker.entry import _build
from tests.processes.ranks import run_on_ranks
from tests.processes.test_split_training import _same

# Less than the whole network takes, so that its layers must be cut; without it they need not.
TIGHT = {"parallel.memory": "3MiB"}
PLAIN = (bool, int, float, str, type(None))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What was measured on this machine before decides nothing here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _heavy():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 5))


def _light():
    """Much work for few weights: nothing is gained by cutting them."""
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)),
    )


def _parts(world, network, folder, settings):
    torch.manual_seed(3)
    flags = {
        "data.name": "synthetic:103x1x8x8x5", "train.batch": 29, "train.epochs": 50, "train.lr": 0.05,
        "train.evaluate_every": 0.0, "train.weight_decay": 1e-3,
        "train.precision": "fp64", "train.channels_last": False, "parallel.mode": "auto",
        "parallel.measure": False, **settings,
    }  # fmt: skip
    run = RunFolder(Path(folder))
    return _build(load_job(flags, environment={}).job, run, world, {"live": Objects(network())})


def _updates(parts, count):
    while count:
        for update in parts.feed.updates(parts.progress.epoch, parts.progress.step_in_epoch):
            parts.updater(update, parts.progress.step)
            parts.progress.advance(parts.feed.order.steps_per_epoch)
            count -= 1
            if not count:
                return


def _structure(world, mode):
    """All that could tell two modes apart, as plain data, and the weights after some updates."""
    with tempfile.TemporaryDirectory() as folder:
        parts = _parts(world, _light, folder, {"parallel.mode": mode})
        plan = json.loads((Path(folder) / "plan.json").read_text()) if world.is_main else {}
        network = parts.network
        found = {
            "mode": parts.run.mode,
            "network": {
                **_plain(network),
                "postpone_steps": network.traits.no_sync.__qualname__,
                "layouts": dict(network.layouts),
            },
            "whole": network.call is network.model,
            "wrapper": _plain(network.call),
            "modules": {name: _module(module) for name, module in network.call.named_modules()},
            "parameters": {name: _parameter(one) for name, one in network.call.named_parameters()},
            "feed": (type(parts.feed).__name__, parts.feed.order, parts.feed.sharing, _plain(parts.feed)),
            "loader": _plain(parts.feed.loader),
            "updater": _plain(parts.updater),
            "optimizer": (
                type(parts.updater.optimizer).__name__,
                [{key: one for key, one in group.items() if key != "params"} for group in
                 parts.updater.optimizer.param_groups],
            ),
        }  # fmt: skip
        _updates(parts, 5)
        weights = {name: one.detach().clone() for name, one in network.model.state_dict().items()}
        parts.resources.close()
    return found, weights, plan


def _plain(thing):
    """Its class, and those of its attributes that are plain data; of others, their classes."""
    attributes = dict(vars(thing))
    return {
        "class": type(thing).__qualname__,
        **{name: one if isinstance(one, PLAIN) else type(one).__qualname__ for name, one in attributes.items()},
    }


def _module(module):
    hooks = {
        name: sorted(hook.__qualname__ for hook in hooks.values())
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and hooks
    }
    return f"{type(module).__module__}.{type(module).__qualname__}", hooks, "forward" in vars(module)


def _parameter(parameter):
    hooks = parameter._post_accumulate_grad_hooks or {}, parameter._backward_hooks or {}
    return type(parameter).__name__, tuple(parameter.shape), parameter.requires_grad, *map(len, hooks)


def test_auto_that_keeps_data_parallel_runs_the_very_same_objects():
    auto = run_on_ranks(_structure, 2, "auto")
    data = run_on_ranks(_structure, 2, "data")
    assert auto[0][2]["mode"] == "data"
    assert "data parallel is kept" in auto[0][2]["reason"]
    for (found, weights, _), (wanted, expected, _) in zip(auto, data, strict=True):
        assert not found["network"]["layouts"]
        assert found["network"]["class"] == "FlatNetwork"
        for part, content in wanted.items():
            assert found[part] == content, part
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name


def _train(world, updates, settings, folder=""):
    """A run's letters by op (none for data parallel), what it saved, and what its plan.json says."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        parts = _parts(world, _heavy, place, settings)
        layouts = dict(parts.network.layouts)
        _updates(parts, updates)
        save(parts)
        finish_save(parts)
        saved = plan = None
        if world.is_main:
            saved = load(place / "checkpoints" / f"step-{parts.progress.step:08d}")
            plan = json.loads((place / "plan.json").read_text())
        parts.resources.close()
    return saved, plan, layouts


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [TIGHT, {**TIGHT, "parallel.measure": True}], ids=["predicted", "measured"])
def test_auto_trains_to_the_weights_of_one_process(size, settings):
    alone = run_on_ranks(_train, 1, 6, {})[0]
    several = run_on_ranks(_train, size, 6, settings)
    assert any(layout.cuts for layout in several[0][2].values())
    assert several[0][1]["mode"] == "auto"
    _same(several[0][0], alone[0])


def _chosen(plan):
    return {key: plan.get(key) for key in ("mode", "mesh", "ops", "default", "reason", "candidates")}


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_its_plan_for_the_same_wishes():
    other = {"parallel.link": "1mbit"}
    undisturbed = run_on_ranks(_train, 1, 7, {})[0]
    with tempfile.TemporaryDirectory() as folder:
        begun = run_on_ranks(_train, 2, 4, TIGHT, folder)[0]
        file = Path(folder) / "plan.json"
        content = json.loads(file.read_text())
        # A search would find a reason of its own.
        file.write_text(json.dumps({**content, "reason": "this plan was kept"}))
        resumed = run_on_ranks(_train, 2, 3, {**TIGHT, "checkpoint.resume": "auto"}, folder)[0]
        changed = run_on_ranks(_train, 2, 1, {**other, "checkpoint.resume": "auto"}, folder)[0]
    assert resumed[1]["reason"] == "this plan was kept"
    assert resumed[2] == begun[2]
    _same(resumed[0], undisturbed[0])
    # Where sending is all that costs, every process computes everything.
    assert changed[1]["reason"] != "this plan was kept"
    assert changed[2] != begun[2]


@pytest.mark.parametrize(("letter", "cuts"), [("n", ()), ("i", ((1, (0,)),))])
def test_semi_with_a_search_respects_pins(letter, cuts):
    settings = {"parallel.mode": "semi", "parallel.fill": "search", **TIGHT}
    free = run_on_ranks(_train, 2, 6, settings)[0]
    pinned = run_on_ranks(_train, 2, 6, {**settings, "parallel.pin": (f"1={letter}@dp",)})[0]
    alone = run_on_ranks(_train, 1, 6, {"parallel.mode": "single"})[0]
    assert free[2]["1.weight"].cuts == ((0, (0,)),)
    assert pinned[2]["1.weight"].cuts == cuts
    # What isn't pinned is searched: the large layer must be cut to fit.
    assert pinned[2]["3.weight"].cuts
    for saved, _, _ in (free, pinned):
        _same(saved, alone[0])
