"""A precision and a layout that are "auto": the same at any number of processes, for the life of a run."""

import json
import random
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import manyhands
from manyhands.config.load import load_job, written_values
from manyhands.core import devices
from manyhands.core.machine import Processor
from manyhands.core.run_folder import RunFolder
from manyhands.report.changes import changes_since
from manyhands.train.objects import Objects
from manyhands.train.precision import resolve_precision
from manyhands.train.saving import finish_save, save
from manyhands.worker.entry import _build
from manyhands.worker.plan_search import case_of
from tests.processes.ranks import run_on_ranks

DECIDED = ("train.precision", "train.channels_last")


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


class Exact(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(512, 5)

    def forward(self, images):
        found = self.last(self.first(images).flatten(1))
        if found.dtype != torch.float32:
            raise TypeError("only float32 will do")
        return found


def _build_one(world, folder, network, settings):
    flags = {
        "data.name": "synthetic:60x1x8x8x5", "train.batch": 12, "train.epochs": 9, "train.evaluate_every": 0.0,
        "run.report": False, **dict.fromkeys(DECIDED, "auto"), **settings,
    }  # fmt: skip
    job = load_job(flags, environment={}).job
    return _build(job, RunFolder(Path(folder)), world, {"live": Objects(network() if network else None)})


def _decide(world, folder, network=_net, settings=None, updates=1):
    """What was decided, and what was said; where updates are made the run is saved."""
    folder = Path(folder)
    if world.is_main:
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
    parts = _build_one(world, folder, network, settings or {})
    left = updates
    while left:
        for update in parts.feed.updates(parts.progress.epoch, parts.progress.step_in_epoch):
            parts.updater(update, parts.progress.step)
            parts.count_update()
            left -= 1
            if not left:
                break
    if updates:
        save(parts)
        finish_save(parts)
        if world.is_main:
            parts.folder.metrics.write_text("{}\n")
    parts.resources.close()
    train = parts.job.train
    layouts = {one.is_contiguous(memory_format=torch.channels_last) for one in parts.network.model.parameters()
               if one.ndim == 4 and one.shape[1] > 1}  # fmt: skip
    return train.precision, train.channels_last, parts.updater.gradients.precision, layouts


def _said(folder):
    events = [json.loads(line) for line in (Path(folder) / "events.jsonl").read_text().splitlines()]
    return [one["message"] for one in events if one["kind"] == "note" and one["message"].startswith("train.")]


def _plant(cache, **seconds):
    """Writes other seconds over those that were measured, by words of a variant."""
    (file,) = cache.glob("*.json")
    content = json.loads(file.read_text())
    for key, one in content["times"].items():
        _, _, precision, layout = key.split(" ")
        one["seconds"] = seconds[precision] * seconds.get(layout, 1.0)
    file.write_text(json.dumps(content))
    return file


def test_all_processes_take_the_same_and_so_does_any_number_of_them(tmp_path, own_cache):
    decided, kept = {}, {}
    for size in (1, 2, 3):
        found = run_on_ranks(_decide, size, str(tmp_path / f"at{size}"))
        assert len(set(map(str, found))) == 1
        decided[size], kept[size] = found[0], {file.name: file.read_text() for file in own_cache.iterdir()}
    assert decided[1] == decided[2] == decided[3]
    assert kept[1] == kept[2] == kept[3]
    assert decided[1][0] == decided[1][2]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_measurement_itself_is_of_the_same_at_any_number_of_processes(tmp_path, own_cache, size):
    run_on_ranks(_decide, size, str(tmp_path / "run"))
    (file,) = own_cache.iterdir()
    content = json.loads(file.read_text())
    expected = tmp_path / "alone"
    run_on_ranks(_decide, 1, str(expected))
    assert content["environment"]["threads"] == "1"
    assert content == json.loads(file.read_text()), "another number of processes measured anew"
    assert len(content["times"]) == 4
    said = json.loads((expected / "plan.json").read_text())["precision_measured"][0]["seconds"]
    assert set(said.values()) == {one["seconds"] for one in content["times"].values()}


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ({"fp32": 4.0, "bf16": 1.0, "channels_last": 0.5}, ("bf16", True)),
        ({"fp32": 4.0, "bf16": 3.5, "channels_last": 0.5}, ("fp32", True)),
        ({"fp32": 4.0, "bf16": 1.0, "channels_last": 2.0}, ("bf16", False)),
    ],
)
def test_what_is_kept_decides_and_is_not_measured_again(tmp_path, own_cache, seconds, taken):
    run_on_ranks(_decide, 1, str(tmp_path / "first"))
    file = _plant(own_cache, **seconds)
    before = file.read_text()
    for size in (1, 2):
        found = run_on_ranks(_decide, size, str(tmp_path / f"at{size}"))[0]
        assert found[:2] == taken
        assert found[2] == taken[0]
        folder = tmp_path / f"at{size}"
        written, plan = written_values(folder / "job.toml"), json.loads((folder / "plan.json").read_text())
        assert tuple(written[key] for key in DECIDED) == taken
        assert tuple(plan["resolved"][key] for key in DECIDED) == taken == (plan["precision"], plan["channels_last"])
        assert len(_said(folder)) == 2
    assert file.read_text() == before


def test_a_run_keeps_what_it_decided_whatever_is_measured_later_until_the_user_says_otherwise(tmp_path, own_cache):
    run_on_ranks(_decide, 1, str(tmp_path / "first"))
    _plant(own_cache, fp32=4.0, bf16=1.0, channels_last=0.5)
    run = str(tmp_path / "run")
    assert run_on_ranks(_decide, 2, run)[0][:2] == ("bf16", True)
    _plant(own_cache, fp32=1.0, bf16=4.0, channels_last=2.0)
    for size in (1, 3):
        assert {one[:2] for one in run_on_ranks(_decide, size, run, _net, {"train.epochs": 20})} == {("bf16", True)}
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["resolved"]["train.precision"] == "bf16"
    asked = load_job({"run.out": run, **dict.fromkeys(DECIDED, "auto")}, environment={}).job
    assert not [one for one in changes_since(RunFolder(Path(run)), asked) if one.key in DECIDED]
    said = {"train.precision": "fp32"}
    assert run_on_ranks(_decide, 1, run, _net, said)[0][:2] == ("fp32", True)
    assert run_on_ranks(_decide, 1, run)[0][:2] == ("fp32", True)


@pytest.mark.parametrize("junk", ["", "{", "[1, 2]", '{"format": "op-times/2", "times": 3}', "\x00\xff"])
def test_junk_in_the_cache_is_passed_over(tmp_path, own_cache, junk):
    run_on_ranks(_decide, 1, str(tmp_path / "first"))
    (file,) = own_cache.iterdir()
    file.write_text(junk)
    precision, layout, *_ = run_on_ranks(_decide, 1, str(tmp_path / "second"))[0]
    assert (precision in {"fp32", "bf16"}, isinstance(layout, bool)) == (True, True)
    assert len(json.loads(file.read_text())["times"]) == 4


def _wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20_000), nn.ReLU(), nn.Linear(20_000, 5))


def _small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


class Drawing:
    """Samples that are drawn anew each time, by generators that all of a process share."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((1, 8, 8), random.random() + float(numpy.random.random()) + float(torch.rand(()))), index % 5


@pytest.mark.parametrize(("network", "timed"), [(_small, 0), (_wide, 2), (_net, 4)])
def test_what_cannot_pay_is_not_timed(tmp_path, own_cache, network, timed):
    found = run_on_ranks(_decide, 2, str(tmp_path / "run"), network)
    assert {one[1] for one in found} <= {False, timed == 4}
    counted = [len(json.loads(file.read_text())["times"]) for file in own_cache.glob("*.json")]
    assert sum(counted) == timed
    assert len(_said(tmp_path / "run")) == timed // 2
    if not timed:
        written = written_values(tmp_path / "run" / "job.toml")
        assert [written[key] for key in DECIDED] == ["fp32", False]


def _drawn(world, folder):
    job = load_job({"run.out": folder, "train.batch": 12, **dict.fromkeys(DECIDED, "auto")}, environment={}).job
    objects = Objects(_net(), train_set=Drawing(), test_set=Drawing())
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    settled = resolve_precision(job, RunFolder(Path(folder)), world, "single", objects)
    assert before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return settled.about["precision_measured"][0]["seconds"]


def test_a_measurement_leaves_random_numbers_as_they_were(tmp_path):
    assert len(run_on_ranks(_drawn, 1, str(tmp_path / "run"))[0]) == 4


def test_a_run_that_goes_on_elsewhere_from_a_checkpoint_keeps_what_that_was_trained_in(tmp_path, own_cache):
    run_on_ranks(_decide, 1, str(tmp_path / "first"))
    _plant(own_cache, fp32=4.0, bf16=1.0, channels_last=0.5)
    run_on_ranks(_decide, 1, str(tmp_path / "run"))
    _plant(own_cache, fp32=1.0, bf16=4.0, channels_last=2.0)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    moved = shutil.copytree(checkpoint, tmp_path / "moved" / checkpoint.name)
    for number, start in enumerate((tmp_path / "run", checkpoint, moved)):
        goes_on = {"checkpoint.resume": str(start)}
        found = run_on_ranks(_decide, 2, str(tmp_path / f"new{number}"), _net, goes_on, 0)
        assert {one[:2] for one in found} == {("bf16", True)}
    assert run_on_ranks(_decide, 1, str(tmp_path / "fresh"))[0][:2] == ("fp32", False)


@pytest.mark.parametrize(("network", "key", "value"), [(Viewed, DECIDED[1], False), (Exact, DECIDED[0], "fp32")])
def test_a_network_that_cannot_run_otherwise_stays_as_it_is_and_one_line_says_so(tmp_path, network, key, value):
    run_on_ranks(_decide, 2, str(tmp_path / "run"), network, {other: False for other in DECIDED[1:] if other != key})
    written = written_values(tmp_path / "run" / "job.toml")
    assert written[key] == value
    told = [one for one in _said(tmp_path / "run") if one.startswith(key)]
    assert len(told) == 1
    assert "the benchmark of " in told[0]


def test_a_processor_without_bf16_takes_fp32_and_bf16_is_not_even_tried(tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr(devices, "this_processor", lambda: Processor("old", False))
    assert {one[0] for one in run_on_ranks(_decide, 2, str(tmp_path / "run"))} == {"fp32"}
    (file,) = own_cache.iterdir()
    assert "bf16" not in file.read_text()
    assert _said(tmp_path / "run")[0].endswith("has no native bf16")


def test_what_the_user_names_is_taken_and_nothing_is_measured(tmp_path, own_cache):
    named = {"train.precision": "bf16", "train.channels_last": True}
    assert run_on_ranks(_decide, 1, str(tmp_path / "run"), _net, named)[0][:2] == ("bf16", True)
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
