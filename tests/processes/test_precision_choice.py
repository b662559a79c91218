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
from manyhands.core.machine import CpuModel
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.report.changes import changes_since
from manyhands.train.objects import Objects
from manyhands.train.precision import resolve_precision
from manyhands.train.saving import finish_save, save
from manyhands.worker.plan_search import make_plan_case
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import built, linear, lines, normed

DECIDED = ("train.precision", "train.channels_last")
AUTO = dict.fromkeys(DECIDED, "auto")


def _new_processor(knows_bf16=True):
    """This machine's processor is one that knows bf16, or one that doesn't."""
    devices.cpu_model = lambda: CpuModel("some", knows_bf16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What was measured on this machine before decides nothing here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(devices, "cpu_model", devices.cpu_model)  # is put back at the end
    return tmp_path / "cache" / "manyhands" / "planner"


class Exact(nn.Module):
    """Takes neither another layout nor another precision."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(512, 5)

    def forward(self, images):
        found = self.last(self.first(images).view(len(images), -1))
        if found.dtype != torch.float32:
            raise TypeError("only float32 will do")
        return found


def _decide(world, folder, network=normed, settings=None, *, saves=True, knows_bf16=True):
    """What was decided, precision and layout as they are then; after an update the run is saved."""
    _new_processor(knows_bf16)
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


def _alone(folder, *how, **others):
    return _decide(World(), folder, *how, **others)


def _said(folder):
    notes = [one["message"] for one in lines(folder / "events.jsonl") if one["kind"] == "note"]
    return [note for note in notes if note.startswith("train.")]


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


def test_all_processes_take_the_same_and_the_measurement_is_of_the_same_at_any_number_of_them(tmp_path, own_cache):
    decided = []
    for size in (2, 1, 3):
        found = run_on_ranks(_decide, size, tmp_path / f"at{size}")
        assert len(set(map(str, found))) == 1
        decided.append((found[0], {file.name: file.read_text() for file in own_cache.iterdir()}))
        assert decided[0] == decided[-1], "another number of processes measured anew"
    assert decided[0][0][0] == decided[0][0][2]
    (text,) = decided[0][1].values()
    content, plan = json.loads(text), json.loads((tmp_path / "at2" / "plan.json").read_text())
    assert content["environment"]["threads"] == "1"
    assert len(content["times"]) == 4
    said = plan["precision_measured"][0]["seconds"]
    assert set(said.values()) == {one["seconds"] for one in content["times"].values()}


def test_a_run_keeps_what_it_decided_whatever_is_measured_later_until_the_user_says_otherwise(tmp_path, own_cache):
    _alone(tmp_path / "first")
    cached = _plant(own_cache, **BF16_LAST).read_text()
    run = tmp_path / "run"
    assert run_on_ranks(_decide, 2, run)[0] == ("bf16", True, "bf16", {True})
    assert [file.read_text() for file in own_cache.iterdir()] == [cached], "it is not measured again"
    written, plan = written_values(run / "job.toml"), json.loads((run / "plan.json").read_text())
    assert [written[key] for key in DECIDED] == [plan["resolved"][key] for key in DECIDED] == ["bf16", True]
    assert (plan["precision"], plan["channels_last"], len(_said(run))) == ("bf16", True, 2)
    _plant(own_cache, **FP32)
    assert _alone(run, normed, {"train.epochs": 20})[:2] == ("bf16", True)
    assert json.loads((run / "plan.json").read_text())["resolved"]["train.precision"] == "bf16"
    asked = load_job({"run.out": str(run), **AUTO}, environment={}).job
    assert not [one for one in changes_since(RunFolder(run), asked) if one.key in DECIDED]
    assert _alone(run, normed, {"train.precision": "fp32"})[:2] == ("fp32", True)
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


def _wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20_000), nn.ReLU(), nn.Linear(20_000, 5))


@pytest.mark.parametrize(("network", "timed"), [(linear, 0), (_wide, 2), (normed, 4)])
def test_what_cannot_pay_is_not_timed(tmp_path, own_cache, network, timed):
    found = _alone(tmp_path / "run", network)
    assert found[1] in {False, timed == 4}
    counted = [len(json.loads(file.read_text())["times"]) for file in own_cache.glob("*.json")]
    assert sum(counted) == timed
    assert len(_said(tmp_path / "run")) == timed // 2
    assert timed or found[:2] == ("fp32", False)


def test_a_network_that_cannot_run_otherwise_stays_as_it_is_and_a_line_for_each_says_so(tmp_path):
    assert _alone(tmp_path / "run", Exact)[:2] == ("fp32", False)
    for key, said in zip(DECIDED, _said(tmp_path / "run"), strict=True):
        assert said.startswith(key)
        assert "the benchmark of " in said


def test_a_processor_without_bf16_takes_fp32_and_bf16_is_not_even_tried(tmp_path, own_cache):
    assert _alone(tmp_path / "run", knows_bf16=False)[0] == "fp32"
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
    objects = Objects(normed(), train_set=Drawing(), test_set=Drawing())
    before = _generators()
    _new_processor()
    resolved = resolve_precision(job, RunFolder(tmp_path), World(), "single", objects)
    assert before == _generators()
    assert len(resolved.plan_fields["precision_measured"][0]["seconds"]) == 4


def test_what_the_user_names_or_computes_is_taken_and_nothing_is_measured(tmp_path, own_cache):
    named = {"train.precision": "bf16", "train.channels_last": True}
    assert _alone(tmp_path / "run", normed, named)[:2] == ("bf16", True)
    with manyhands.session(precision="auto", channels_last="auto") as here:  # computes as it is written
        optimizer = torch.optim.SGD((net := normed()).parameters(), 0.1)
        model, _, batches = here.prepare(net, optimizer, Drawing(), batch=6)
        images, _ = next(under_way := iter(batches))
        assert model(images).dtype == torch.float32
        under_way.close()
    assert not own_cache.exists()
    assert not _said(tmp_path / "run")


def test_trials_of_plans_are_in_the_layout_of_the_job():
    for last in (False, True):
        job = load_job({"model.name": "cnn", "train.channels_last": last}, environment={}).job
        model = make_plan_case(job, {"channels": 3, "size": 8, "classes": 5, "batch": 4}, "cpu").make()
        layouts = {one.is_contiguous(memory_format=torch.channels_last) for one in model.parameters() if one.ndim == 4}
        assert layouts == {last}
