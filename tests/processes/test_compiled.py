"""A compiled network: the same updates, only usual passes compiled, decided once for the life of a run."""

import copy
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.config.load import load_job, written_values
from manyhands.core.folder import RunFolder
from manyhands.core.world import World
from manyhands.planner.compiling import MANY, KindOfCompiler, choose_compile
from manyhands.train.data_setup import Objects
from manyhands.train.saving import save, settle
from manyhands.worker.compile_trial import try_out
from manyhands.worker.compiling import settle_compile
from manyhands.worker.entry import _build
from manyhands.worker.precision import SettledPrecision
from tests.processes.ranks import run_on_ranks

EPOCHS = 2000  # of 60 samples: enough to be looked at


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
    usual = {"batch": 12, "epochs": EPOCHS, "precision": "fp32", "channels_last": False, "evaluate_every": 0.0}
    return load_job(flags | {f"train.{key}": value for key, value in (usual | train).items()}, environment={}).job


def _settled(world, folder, **train):
    """Whether it compiles, and what is said."""
    job, mode = _job(folder, **train), "single" if world.alone else "data"
    settled = settle_compile(SettledPrecision(job), RunFolder(Path(folder)), world, mode, Objects(_net()))
    return settled.job.train.compile, settled.said, settled.about


def _plant(cache, **seconds):
    """Writes other seconds over those that are kept, by the last or the first word of their names."""
    (file,) = (cache / "planner").glob("*.json")
    content = json.loads(file.read_text())
    (pass_of,) = [key for key in content["times"] if key.startswith("precision ")]
    content["times"][pass_of]["seconds"] = 12.0
    for word, one in seconds.items():
        _, network, *variant = pass_of.split(" ")
        content["times"][" ".join(["compile", network, "12", *variant, word])] = content["times"][pass_of] | {
            "seconds": one
        }
    file.write_text(json.dumps(content))


def test_a_short_run_does_not_even_look(own_cache, tmp_path):
    assert run_on_ranks(_settled, 2, str(tmp_path / "run"), start="fork")[0][0] is False
    assert _settled(World(), tmp_path / "run", epochs=9)[:2] == (False, [])
    kept = json.loads(next((own_cache / "planner").glob("*.json")).read_text())["times"]
    assert [key.partition(" ")[0] for key in kept] == ["precision"]


def test_any_number_of_processes_decides_alike_and_by_the_rule(own_cache, tmp_path):
    _settled(World(), tmp_path / "run")
    for compiled, making in ((0.5, 1.0), (0.98, 1.0), (0.5, 1e9), (0.0, 0.0)):
        _plant(own_cache, plain=1.0, compiled=compiled, making=making)
        found = [one for size in (1, 2, 3) for one in run_on_ranks(_settled, size, str(tmp_path / "run"))]
        refused = "" if compiled else "the network couldn't be compiled when it was last tried"
        expected, said = choose_compile([KindOfCompiler("here", 1.0, compiled, making, refused)], 60 * EPOCHS)
        assert found == [(expected, [said], found[0][2])] * 6
        assert found[0][2]["resolved"] == {"train.compile": expected}
        assert expected == ((compiled, making) == (0.5, 1.0))


@pytest.mark.parametrize(("said", "becomes"), [(True, True), (False, False)])
def test_what_the_user_says_is_taken_and_nothing_is_measured(own_cache, tmp_path, said, becomes):
    assert _settled(World(), tmp_path / "run", compile=said)[:2] == (becomes, [])
    assert not own_cache.exists()


def _build_and_save(world, folder):
    (Path(folder) / "ranks").mkdir(parents=True, exist_ok=True)
    trainer = _build(_job(folder), RunFolder(Path(folder)), world, {"live": Objects(_net())})
    trainer.update(next(trainer.feed.updates(0, 0)), 0)
    trainer.count_update()
    save(trainer)
    settle(trainer)
    if world.is_main:
        trainer.folder.metrics.write_text("{}\n")
    trainer.release()
    return trainer.job.train.compile


@pytest.mark.slow
def test_a_run_keeps_what_it_decided(own_cache, tmp_path):
    """On two processes, which share the groups of BatchNorm: then no pass is compiled, and a line says so."""
    run = tmp_path / "run"
    _settled(World(), run)
    _plant(own_cache, plain=1.0, compiled=0.5, making=1.0)
    assert run_on_ranks(_build_and_save, 2, str(run)) == [True, True]
    assert written_values(run / "job.toml")["train.compile"] is True
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["compile"], plan["resolved"]["train.compile"]) == (True, True)
    assert plan["compile_measured"][0]["compiled_s"] == 0.5
    notes = [line for line in (run / "events.jsonl").read_text().splitlines() if "nothing is compiled" in line]
    assert len(notes) == 1
    _plant(own_cache, plain=1.0, compiled=2.0, making=1.0)
    assert _settled(World(), run)[:2] == (True, [])
    assert _settled(World(), tmp_path / "another")[0] is False


def _trained(folder, compiled):
    """The weights after five updates, the last of them smaller; and how often torch compiled."""
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    (Path(folder) / "ranks").mkdir(parents=True)
    trainer = _build(
        _job(folder, batch=14, compile=compiled), RunFolder(Path(folder)), World(), {"live": Objects(_net())}
    )
    for update in trainer.feed.updates(0, 0):
        trainer.update(update, trainer.progress.step)
        trainer.count_update()
    trainer.evaluate()
    model = trainer.network.inner
    trainer.release()
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


class Unlike(nn.Linear):
    def forward(self, images):
        return super().forward(images.flatten(1)) * (1.0 if torch.compiler.is_compiling() else 2.0)


@pytest.mark.slow
def test_a_network_is_compiled_in_a_process_of_its_own_and_refused_where_it_computes_something_else(
    own_cache, tmp_path
):
    _settled(World(), tmp_path / "run")
    _plant(own_cache)
    compiles, (said,), about = _settled(World(), tmp_path / "run")
    (kind,) = about["compile_measured"]
    assert "takes longer" in kind["refused"] or min(kind["plain_s"], kind["compiled_s"], kind["making_s"]) > 0
    assert (compiles, said) == choose_compile([KindOfCompiler(**kind)], 60 * EPOCHS)
    assert kind["making_s"] * MANY < 12.0 * 60 * EPOCHS
    given = {
        "job": _job("x").model_dump(mode="json"),
        "device": "cpu",
        "model": Unlike(64, 5),
        "images": torch.rand(4, 1, 8, 8),
    }
    assert "gradients would be" in try_out(given)["refused"]
