"""A compiled network makes the same updates, and only the passes of a whole update are compiled."""

import copy
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.train.objects import Objects
from manyhands.worker.entry import _build
from tests.processes.ranks import run_on_ranks


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MANYHANDS_CACHE", raising=False)
    # Set and taken away again by what is tested.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path / "cache" / "manyhands"


def _net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5))


def _job(folder, **train):
    flags = {"data.name": "synthetic:60x1x8x8x5", "run.out": str(folder), "run.report": False}
    usual = {"batch": 12, "epochs": 1, "precision": "fp32", "channels_last": False, "evaluate_every": 0.0}
    return load_job(flags | {f"train.{key}": value for key, value in (usual | train).items()}, environment={}).job


def _trained(folder, compiled):
    """The weights after five updates, the last of them smaller; and how often torch compiled."""
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    (Path(folder) / "ranks").mkdir(parents=True)
    trainer = _build(
        _job(folder, batch=14, compile=compiled), RunFolder(Path(folder)), World(), {"live": Objects(_net())}
    )
    for update in trainer.feed.updates(0, 0):
        trainer.updater(update, trainer.progress.step)
        trainer.count_update()
    trainer.evaluate()
    model = trainer.network.model
    trainer.resources.close()
    copy.deepcopy(model)(torch.zeros(3, 1, 8, 8))
    return [one.detach().clone() for one in model.state_dict().values()], counters["unique_graphs"] - before


@pytest.mark.slow
def test_compiled_updates_are_those_of_the_network_and_only_usual_passes_are_compiled(own_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    plain, none = _trained(tmp_path / "plain", compiled=False)
    found, graphs = _trained(tmp_path / "compiled", compiled=True)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (none, graphs) == (0, 1)
    notes = [json.loads(line) for line in (tmp_path / "compiled" / "events.jsonl").read_text().splitlines()]
    told = [note["message"].partition(" the network")[0] for note in notes if "the network" in note["message"]]
    assert told == ["compiling", "compiled"]
    folder = own_cache / "compiled"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert any(folder.iterdir())


def _notes(world, folder):
    Path(folder, "ranks").mkdir(parents=True, exist_ok=True)
    trainer = _build(_job(folder, compile=True), RunFolder(Path(folder)), world, {"live": Objects(_net())})
    trainer.updater(next(trainer.feed.updates(0, 0)), 0)
    trainer.resources.close()


def test_passes_with_shared_batch_norm_groups_are_not_compiled(tmp_path):
    run_on_ranks(_notes, 2, str(tmp_path / "run"))
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert len([line for line in events if "torch.compile is skipped" in line]) == 1
