"""A compiled network makes the same updates, and only the passes of a whole update are compiled."""

import copy
import json
import os
import stat

import pytest
import torch
from torch import nn

from manyhands.core.world import World
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import built


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MANYHANDS_CACHE", raising=False)
    # Set and taken away again by what is tested.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path / "cache" / "manyhands"


def _trained(world, folder, compiled, batch, updates):
    """The weights after some updates; and how often torch compiled."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5))
    flags = {
        "data.name": "synthetic:60x1x8x8x5", "train.epochs": 1, "train.batch": batch, "train.compile": compiled,
        "train.precision": "fp32", "train.channels_last": False,
    }  # fmt: skip
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    with built(world, net, flags, folder, as_worker=True) as trainer:
        for _, update in zip(range(updates), trainer.feed.updates(0, 0), strict=False):
            trainer.updater(update, trainer.progress.step)
            trainer.count_update()
        if world.alone:
            trainer.evaluate()
        model = trainer.network.model
    copy.deepcopy(model)(torch.zeros(3, 1, 8, 8))
    return [one.detach().clone() for one in model.state_dict().values()], counters["unique_graphs"] - before


def _notes(folder):
    return [json.loads(line)["message"] for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_compiled_updates_are_those_of_the_network_and_only_usual_passes_are_compiled(own_cache, tmp_path, monkeypatch):
    """Of five updates the last one is smaller."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    plain, none = _trained(World(), tmp_path / "plain", False, 14, 5)
    found, graphs = _trained(World(), tmp_path / "compiled", True, 14, 5)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (none, graphs) == (0, 1)
    said = [note.partition(" the network")[0] for note in _notes(tmp_path / "compiled") if "the network" in note]
    assert said == ["compiling", "compiled"]
    folder = own_cache / "compiled"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert any(folder.iterdir())


def test_passes_with_shared_batch_norm_groups_are_not_compiled(tmp_path):
    run_on_ranks(_trained, 2, tmp_path, True, 12, 1)
    assert len([note for note in _notes(tmp_path) if "torch.compile is skipped" in note]) == 1
