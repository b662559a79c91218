"""A precision and a layout that are "auto": the same at any number of processes, for the life of a run."""

import json
import random
import shutil

import numpy
import pytest
import torch
from torch import nn

import manyhands
from manyhands.config.load import load_job, written_values
from manyhands.core import devices
from manyhands.core.machine import Processor
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.report.changes import changes_since
from manyhands.train.objects import Objects
from manyhands.train.precision import resolve_precision
from manyhands.train.saving import finish_save, save
from manyhands.worker.plan_search import case_of
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import built

DECIDED = ("train.precision", "train.channels_last")
AUTO = dict.fromkeys(DECIDED, "auto")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What was measured on this machine before decides nothing here; its processor is one that knows bf16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(devices, "this_processor", lambda: Processor("some", True))
    return tmp_path / "cache" / "manyhands" / "planner"


def _net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5))


class Viewed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(512, 5)

    def forward(self, images):
        return self.last(self.first(images).view(len(images), -1))


class Exact(Viewed):
    def forward(self, images):
        found = self.last(self.first(images).flatten(1))
        if found.dtype != torch.float32:
            raise TypeError("only float32 will do")
        return found


def _decide(world, folder, network=_net, settings=None, *, saves=True):
    """What was decided, precision and layout as they are then; after an update the run is saved."""
    flags = {
        "data.name": "synthetic:60x1x8x8x5", "train.batch": 12, "train.epochs": 9, "run.report": False, **AUTO,
        **(settings or {}),
    }  # fmt: skip
    with built(world, network(), flags, folder, as_worker=True) as trainer:
        if saves:
            update = next(trainer.feed.updates(trainer.progress.epoch, trainer.progress.step_in_epoch))
            trainer.updater(update, trainer.progress.step)
            trainer.count_update()
            save(trainer)
            finish_save(trainer)
            if world.is_main:
                trainer.folder.metrics.write_text("{}\n")
        train, weights = trainer.job.train, trainer.network.model.parameters()
        matrices = [one for one in weights if one.ndim == 4 and one.shape[1] > 1]
        layouts = {one.is_contiguous(memory_format=torch.channels_last) for one in matrices}
        return train.precision, train.channels_last, trainer.updater.gradients.precision, layouts


def _alone(folder, *how):
    return _decide(World(), folder, *how)


def _said(folder):
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [one["message"] for one in events if one["kind"] == "note" and one["message"].startswith("train.")]


BF16_LAST, FP32 = {"fp32": 4.0, "bf16": 1.0, "channels_last": 0.5}, {"fp32": 1.0, "bf16": 4.0, "channels_last": 2.0}


def _plant(cache, **seconds):
    """Writes other seconds over those that were measured, by words of a variant."""
    (file,) = cache.glob("*.json")
    content = json.loads(file.read_text())
    for key, one in content["times"].items():
        _, _, precision, layout = key.split(" ")
        one["seconds"] = seconds[precision] * seconds.get(layout, 1.0)
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize("first", [1, 2, 3])
def test_all_processes_take_the_same_and_the_measurement_is_of_the_same_at_any_number_of_them(
    first, tmp_path, own_cache
):
    """Whoever measures first."""
    decided = []
    for size in (first, first % 3 + 1):
        found = run_on_ranks(_decide, size, tmp_path / f"at{size}")
        assert len(set(map(str, found))) == 1
        decided.append((found[0], {file.name: file.read_text() for file in own_cache.iterdir()}))
        assert decided[0] == decided[-1], "another number of processes measured anew"
    assert decided[0][0][0] == decided[0][0][2]
    (text,) = decided[0][1].values()
    content, plan = json.loads(text), json.loads((tmp_path / f"at{first}" / "plan.json").read_text())
    assert content["environment"]["threads"] == "1"
    assert len(content["times"]) == 4
    said = plan["precision_measured"][0]["seconds"]
    assert set(said.values()) == {one["seconds"] for one in content["times"].values()}


def test_what_is_kept_decides_and_is_not_measured_again(tmp_path, own_cache):
    _alone(tmp_path / "first")
    for number, (seconds, taken) in enumerate((
        (BF16_LAST, ("bf16", True)),
        ({"fp32": 4.0, "bf16": 3.5, "channels_last": 0.5}, ("fp32", True)),
        ({"fp32": 4.0, "bf16": 1.0, "channels_last": 2.0}, ("bf16", False)),
    )):  # fmt: skip
        file = _plant(own_cache, **seconds)
        before = file.read_text()
        folder = tmp_path / str(number)
        found = run_on_ranks(_decide, 1 + number % 2, folder)[0]
        assert found[:3] == (*taken, taken[0])
        written, plan = written_values(folder / "job.toml"), json.loads((folder / "plan.json").read_text())
        assert tuple(written[key] for key in DECIDED) == taken
        assert tuple(plan["resolved"][key] for key in DECIDED) == taken == (plan["precision"], plan["channels_last"])
        assert len(_said(folder)) == 2
        assert file.read_text() == before


def test_a_run_keeps_what_it_decided_whatever_is_measured_later_until_the_user_says_otherwise(tmp_path, own_cache):
    _alone(tmp_path / "first")
    _plant(own_cache, **BF16_LAST)
    run = tmp_path / "run"
    assert run_on_ranks(_decide, 2, run)[0][:2] == ("bf16", True)
    _plant(own_cache, **FP32)
    for size in (1, 3):
        assert {one[:2] for one in run_on_ranks(_decide, size, run, _net, {"train.epochs": 20})} == {("bf16", True)}
    assert json.loads((run / "plan.json").read_text())["resolved"]["train.precision"] == "bf16"
    asked = load_job({"run.out": str(run), **AUTO}, environment={}).job
    assert not [one for one in changes_since(RunFolder(run), asked) if one.key in DECIDED]
    assert _alone(run, _net, {"train.precision": "fp32"})[:2] == ("fp32", True)
    assert _alone(run)[:2] == ("fp32", True)


def test_a_run_that_resumes_elsewhere_from_a_checkpoint_keeps_what_that_was_trained_in(tmp_path, own_cache):
    _alone(tmp_path / "first")
    _plant(own_cache, **BF16_LAST)
    _alone(tmp_path / "run")
    _plant(own_cache, **FP32)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    moved = shutil.copytree(checkpoint, tmp_path / "moved" / checkpoint.name)
    for number, start in enumerate((tmp_path / "run", checkpoint, moved)):
        resumes = {"checkpoint.resume": str(start)}
        found = _decide(World(), tmp_path / f"new{number}", settings=resumes, saves=False)
        assert found[:2] == ("bf16", True)
    assert _alone(tmp_path / "fresh")[:2] == ("fp32", False)


def test_junk_in_the_cache_is_passed_over(tmp_path, own_cache):
    _alone(tmp_path / "first")
    (file,) = own_cache.iterdir()
    for number, junk in enumerate(("", '{"format": "op-times/2", "times": 3}', "\x00\xff")):
        file.write_text(junk)
        precision, layout, *_ = _alone(tmp_path / f"with junk {number}")
        assert (precision in {"fp32", "bf16"}, isinstance(layout, bool)) == (True, True)
        assert len(json.loads(file.read_text())["times"]) == 4


def _wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20_000), nn.ReLU(), nn.Linear(20_000, 5))


def _small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


@pytest.mark.parametrize(("network", "timed"), [(_small, 0), (_wide, 2), (_net, 4)])
def test_what_cannot_pay_is_not_timed(tmp_path, own_cache, network, timed):
    found = run_on_ranks(_decide, 2, tmp_path / "run", network)
    assert {one[1] for one in found} <= {False, timed == 4}
    counted = [len(json.loads(file.read_text())["times"]) for file in own_cache.glob("*.json")]
    assert sum(counted) == timed
    assert len(_said(tmp_path / "run")) == timed // 2
    if not timed:
        written = written_values(tmp_path / "run" / "job.toml")
        assert [written[key] for key in DECIDED] == ["fp32", False]


@pytest.mark.parametrize(("network", "key", "value"), [(Viewed, DECIDED[1], False), (Exact, DECIDED[0], "fp32")])
def test_a_network_that_cannot_run_otherwise_stays_as_it_is_and_one_line_says_so(tmp_path, network, key, value):
    settings = {other: False for other in DECIDED[1:] if other != key}
    run_on_ranks(_decide, 2, tmp_path / "run", network, settings)
    assert written_values(tmp_path / "run" / "job.toml")[key] == value
    (said,) = [one for one in _said(tmp_path / "run") if one.startswith(key)]
    assert "the benchmark of " in said


def test_a_processor_without_bf16_takes_fp32_and_bf16_is_not_even_tried(tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr(devices, "this_processor", lambda: Processor("old", False))
    assert {one[0] for one in run_on_ranks(_decide, 2, tmp_path / "run")} == {"fp32"}
    (file,) = own_cache.iterdir()
    assert "bf16" not in file.read_text()
    assert _said(tmp_path / "run")[0].endswith("has no native bf16")


class Drawing:
    """Samples that are drawn anew each time, by generators that all of a process share."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((1, 8, 8), random.random() + float(numpy.random.random()) + float(torch.rand(()))), index % 5


def _generators():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_a_measurement_leaves_random_numbers_as_they_were(tmp_path):
    job = load_job({"run.out": str(tmp_path), "train.batch": 12, **AUTO}, environment={}).job
    objects = Objects(_net(), train_set=Drawing(), test_set=Drawing())
    before = _generators()
    resolved = resolve_precision(job, RunFolder(tmp_path), World(), "single", objects)
    assert before == _generators()
    assert len(resolved.about["precision_measured"][0]["seconds"]) == 4


def test_what_the_user_names_is_taken_and_nothing_is_measured(tmp_path, own_cache):
    named = {"train.precision": "bf16", "train.channels_last": True}
    assert _alone(tmp_path / "run", _net, named)[:2] == ("bf16", True)
    assert not own_cache.exists()
    assert not _said(tmp_path / "run")


def test_trials_of_plans_are_in_the_layout_of_the_job():
    for last in (False, True):
        job = load_job({"model.name": "cnn", "train.channels_last": last}, environment={}).job
        model = case_of(job, {"channels": 3, "size": 8, "classes": 5, "batch": 4}, "cpu").make()
        layouts = {one.is_contiguous(memory_format=torch.channels_last) for one in model.parameters() if one.ndim == 4}
        assert layouts == {last}


def test_a_loop_of_ones_own_computes_as_it_is_written(own_cache):
    model = _net()
    with manyhands.session(precision="auto", channels_last="auto") as here:
        data = [(torch.rand(1, 8, 8), number % 5) for number in range(12)]
        model, optimizer, samples = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch=6)
        for images, labels in samples:
            outputs = model(images)
            assert outputs.dtype == torch.float32
            here.backward(nn.functional.cross_entropy(outputs, labels))
            optimizer.step()
    assert not own_cache.exists()
