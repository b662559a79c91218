"""A compiled network makes the same updates, and only the passes of a whole update are compiled."""

import copy
import os
import stat

import pytest
import torch

from manyhands.core.world import World
from tests.processes.updates import assert_alike, built, lines, make_updates, normed, trained


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MANYHANDS_CACHE", raising=False)
    # Set and taken away again by what is tested.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path / "cache" / "manyhands"


FLAGS = {
    "data.name": "synthetic:60x1x8x8x5", "train.epochs": 1, "train.precision": "fp32", "train.channels_last": False,
}  # fmt: skip


def _trained(folder, compiled):
    """The weights after five updates, the last one smaller; and how often torch compiled."""
    counters, net = torch._dynamo.utils.counters["stats"], normed()
    before, flags = counters["unique_graphs"], {**FLAGS, "train.batch": 14, "train.compile": compiled}
    with built(World(), net, flags, folder, as_worker=True) as trainer:
        make_updates(trainer, 5)
        trainer.evaluate()
    copy.deepcopy(net)(torch.zeros(3, 1, 8, 8))
    return net.state_dict(), counters["unique_graphs"] - before


def _notes(folder):
    return [one["message"] for one in lines(folder / "events.jsonl")]


@pytest.mark.slow
def test_compiled_updates_are_those_of_the_network_and_only_usual_passes_are_compiled(own_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    plain, none = _trained(tmp_path / "plain", False)
    found, graphs = _trained(tmp_path / "compiled", True)
    assert_alike(found, plain, 1e-4, least=0.1)
    assert (none, graphs) == (0, 1)
    said = [note.partition(" the network")[0] for note in _notes(tmp_path / "compiled") if "the network" in note]
    assert said == ["compiling", "compiled"]
    folder = own_cache / "compiled"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert any(folder.iterdir())


def test_passes_with_shared_batch_norm_groups_are_not_compiled(tmp_path):
    trained(2, [(1, normed, {**FLAGS, "train.batch": 12, "train.compile": True}, tmp_path, (), True)])
    assert len([note for note in _notes(tmp_path) if "torch.compile is skipped" in note]) == 1
