"""Whole runs under each sync method: right numbers, equal replicas, and going on to the last bit."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.checkpoint.folders import remove_step
from manyhands.checkpoint.read import load
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.write import save
from manyhands.config.load import load_job
from manyhands.core.errors import RunError, UserError
from manyhands.core.run_folder import RunFolder
from manyhands.train.build import build
from manyhands.train.loop import fit
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.train.state import capture
from manyhands.train.trial_step import TIMED
from tests.processes.ranks import run_on_ranks

# Torch imports much with its first optimizer; here once, so that not every process that is forked does so.
torch.optim.SGD([torch.zeros(1)], lr=0.1)

# 103 samples in batches of 29 are 4 updates an epoch; 7 lies within the second epoch and within an exchange.
SAVED, TOTAL = 7, 13
LOCAL = {"sync.method": "local", "sync.every": 3, "sync.delay": 2}
METHODS = {
    "powersgd": {"sync.method": "powersgd", "sync.rank": 1},
    "bf16": {"sync.method": "bf16"},
    "int4": {**LOCAL, "sync.codec": "int4"},
    "lowrank": {**LOCAL, "sync.codec": "lowrank", "sync.rank": 1},
    "waiting": {**LOCAL, "sync.codec": "int8", "sync.delay": 0},
    "fp16": {**LOCAL, "sync.codec": "int4", "train.precision": "fp16"},
    "clipped": {**LOCAL, "sync.codec": "bf16", "train.clip": 0.5, "train.optimizer": "adamw", "train.lr": 0.002},
    "passes": {**LOCAL, "sync.codec": "none", "train.micro_batch": 5, "train.channels_last": True},
}


class _Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(384, 12),  # large enough to go as factors
            nn.Linear(12, 5),
        )
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, pictures):
        return self.body(pictures)


class _Rare(_Network):
    """Uses a part of itself for larger batches than the rehearsal's alone."""

    def __init__(self):
        super().__init__()
        self.rare = nn.Linear(5, 5)

    def forward(self, pictures):
        output = self.body(pictures)
        return output + self.rare(output) if self.training and len(pictures) > 2 else output


def _train(world, folder, max_steps, settings, elsewhere=False, network=_Network):
    flags = {
        "data.name": "synthetic:103x1x8x8x5", "train.batch": 29, "train.epochs": 9, "train.max_steps": max_steps,
        "checkpoint.every": f"{SAVED}steps", "checkpoint.keep": 9, **settings,
    }  # fmt: skip
    job = load_job(flags, environment={}).job
    place = Path(folder) / f"machine-{world.rank}" if elsewhere else Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    mode = "single" if world.alone else "data"
    trainer = build(Parts.from_job(job, RunFolder(place), world, mode, Objects(network())))
    first = trainer.progress.step
    fit(trainer)
    trainer.verify_replicas()
    snapshot = capture(trainer.network, trainer.updater.optimizer, trainer.progress, {})
    trainer.resources.close()
    return first, snapshot.model


def _equal(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])] == []


def _back_to(step, folder, other):
    """A copy of a run whose processes were killed after they had saved that step."""
    shutil.copytree(folder, other)
    for path in Path(other).glob("**/step-*"):
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)


def _events(folder, kind):
    lines = (Path(folder) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("powersgd", "int4", "bf16") else pytest.mark.slow) for name in METHODS],
)
def test_a_killed_run_goes_on_to_the_same_bits_and_all_processes_end_with_one_network(name, tmp_path):
    settings = METHODS[name]
    whole = run_on_ranks(_train, 3, str(tmp_path / "run"), TOTAL, settings)
    assert all(_equal(answer[1], whole[0][1]) for answer in whole)
    _back_to(SAVED, tmp_path / "run", tmp_path / "killed")
    again = run_on_ranks(_train, 3, str(tmp_path / "killed"), TOTAL, settings)
    for answer in again:
        assert answer[0] == SAVED
        assert _equal(answer[1], whole[0][1])
    initial = _Network().state_dict()
    for part in ("frozen.weight", "unused.weight"):
        assert torch.equal(whole[0][1][part].float(), initial[part])
    assert not torch.equal(whole[0][1]["body.0.weight"].float(), initial["body.0.weight"])
    assert not any("without the sync" in event["message"] for event in _events(tmp_path / "killed", "warning"))


@pytest.mark.parametrize("elsewhere", [True, False])
def test_machines_without_a_shared_disk_keep_their_own(elsewhere, tmp_path):
    settings = METHODS["int4"]
    whole = run_on_ranks(_train, 2, str(tmp_path / "run"), TOTAL, settings, elsewhere)
    for rank in (0, 1) if elsewhere else ():
        own = tmp_path / "run" / f"machine-{rank}" / "checkpoints"
        assert (own / f"rank-0000{rank}-of-00002").is_dir()
        assert not (own / f"rank-0000{1 - rank}-of-00002").exists()
        assert bool(list(own.glob("step-*"))) == (rank == 0)
    _back_to(SAVED, tmp_path / "run", tmp_path / "killed")
    again = run_on_ranks(_train, 2, str(tmp_path / "killed"), TOTAL, settings, elsewhere)
    assert _equal(again[1][1], whole[0][1])


@pytest.mark.parametrize(("size", "method"), [(2, "int4"), (1, "int4"), (2, "allreduce"), (3, "lost")])
def test_without_what_each_had_alone_a_run_goes_on_from_the_agreed_network(size, method, tmp_path):
    """On another number of processes, by another method, or where a machine's disk is gone."""
    run_on_ranks(_train, 3, str(tmp_path / "run"), TOTAL, METHODS["int4"])
    _back_to(SAVED, tmp_path / "run", tmp_path / "other")
    if method == "lost":
        shutil.rmtree(tmp_path / "other" / "checkpoints" / "rank-00001-of-00003")
    settings = {"sync.method": "allreduce"} if method == "allreduce" else METHODS["int4"]
    answers = run_on_ranks(_train, size, str(tmp_path / "other"), TOTAL, settings)
    assert all(answer[0] == SAVED and _equal(answer[1], answers[0][1]) for answer in answers)
    said = [event["message"] for event in _events(tmp_path / "other", "warning")]
    assert any("without the sync" in message for message in said) == (method != "allreduce" and size > 1)


class _Overflowing(_Network):
    """Its gradients overflow while it is tried and timed, as they may in fp16; not in training."""

    def __init__(self):
        super().__init__()
        self.tries = 1 + TIMED

    def forward(self, pictures):
        output = super().forward(pictures)
        if self.training and self.tries:
            self.tries -= 1
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output


def test_what_is_not_said_is_measured_and_the_network_is_left_as_it_was(tmp_path):
    settings = {"sync.method": "local", "train.micro_batch": 5}
    answers = run_on_ranks(_train, 2, str(tmp_path / "run"), TOTAL, settings, False, _Overflowing)
    assert all(_equal(answer[1], answers[0][1]) for answer in answers)
    assert all(tensor.isfinite().all() for tensor in answers[0][1].values())
    (event,) = _events(tmp_path / "run", "sync")
    assert event["data"]["method"] == "local"
    assert event["data"]["step_s"] > 0


def _without_room(world, folder, settings):
    if world.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with pytest.raises(RunError, match="could not be saved"):
        _train(world, folder, TOTAL, settings)


def test_what_goes_with_the_last_good_checkpoint_is_kept_where_the_next_one_fails(tmp_path):
    settings = {**METHODS["int4"], "checkpoint.keep": 1}
    run_on_ranks(_train, 2, str(tmp_path / "run"), TOTAL, METHODS["int4"])
    _back_to(SAVED, tmp_path / "run", tmp_path / "full")
    run_on_ranks(_without_room, 2, str(tmp_path / "full"), settings)
    for rank in range(2):
        own = tmp_path / "full" / "checkpoints" / f"rank-0000{rank}-of-00002"
        assert (own / f"step-{SAVED:08d}").is_dir()


OTHER = {
    "codec": {**METHODS["int4"], "sync.codec": "lowrank"},
    "method": METHODS["powersgd"],
    "rank": {**METHODS["lowrank"], "sync.rank": 2},
}


@pytest.mark.parametrize(("before", "after"), [("int4", "codec"), ("int4", "method"), ("lowrank", "rank")])
def test_what_another_method_held_back_is_left_and_said(before, after, tmp_path):
    run_on_ranks(_train, 2, str(tmp_path / "run"), TOTAL, METHODS[before])
    _back_to(SAVED, tmp_path / "run", tmp_path / "other")
    answers = run_on_ranks(_train, 2, str(tmp_path / "other"), TOTAL, OTHER[after])
    assert all(answer[0] == SAVED and _equal(answer[1], answers[0][1]) for answer in answers)
    said = [event["message"] for event in _events(tmp_path / "other", "warning")]
    assert any("synchronization state" in message and "other settings" in message for message in said)


@pytest.mark.parametrize("name", ["powersgd", "lowrank"])
def test_what_another_version_kept_with_factors_is_left_and_said(name, tmp_path):
    run_on_ranks(_train, 2, str(tmp_path / "run"), TOTAL, METHODS[name])
    _back_to(SAVED, tmp_path / "run", tmp_path / "other")
    for path in (tmp_path / "other").glob("checkpoints/rank-*/step-*"):
        _as_before_factors_had_a_format(path)
    answers = run_on_ranks(_train, 2, str(tmp_path / "other"), TOTAL, METHODS[name])
    assert all(answer[0] == SAVED and _equal(answer[1], answers[0][1]) for answer in answers)
    said = [event["message"] for event in _events(tmp_path / "other", "warning")]
    assert any("synchronization state" in message and "factor" in message for message in said)


def _as_before_factors_had_a_format(path):
    """Names and contents as they were, committed anew."""
    found = load(path)
    del found.state["own"]["format of factors"]
    held = {name: tensor for name, tensor in found.model.items() if name.endswith("held")}
    remove_step(path.parent, SAVED)
    save(path.parent, SAVED, Snapshot(held, found.optimizer, found.state))


@pytest.mark.parametrize("name", ["int4", "powersgd", "bf16"])
def test_what_the_rehearsal_did_not_use_is_agreed_on_when_it_is_used(name, tmp_path):
    answers = run_on_ranks(_train, 2, str(tmp_path / "run"), TOTAL, METHODS[name], False, _Rare)
    assert not torch.equal(answers[0][1]["rare.weight"].float(), _Rare().state_dict()["rare.weight"])
    assert all(_equal(answer[1], answers[0][1]) for answer in answers)


@pytest.mark.parametrize("batch", [27, 29], ids=["equal shares", "unequal shares"])
def test_agreeing_after_every_step_is_plain_data_parallel(batch, tmp_path):
    exact = {
        "train.batch": batch,
        "train.drop_last": True,
        "train.precision": "fp64",
        "train.channels_last": False,
        "train.norm_group": "local",
        "train.clip": 0.0,
    }
    plain = run_on_ranks(_train, 3, str(tmp_path / "plain"), TOTAL, {**exact, "sync.method": "allreduce"})
    each = {"sync.method": "local", "sync.codec": "none", "sync.every": 1, "sync.delay": 0}
    local = run_on_ranks(_train, 3, str(tmp_path / "local"), TOTAL, {**exact, **each})
    for name, wanted in plain[0][1].items():
        if "running" in name and batch == 29:
            continue  # processes count alike in the mean of statistics, whatever their shares
        torch.testing.assert_close(local[0][1][name], wanted, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("settings", [
    {"sync.method": "powersgd", "train.precision": "fp16"},
    {"sync.method": "local", "train.norm_group": "global"},
    {"sync.method": "local", "sync.every": 2, "sync.delay": 3},
], ids=lambda settings: settings["sync.method"])  # fmt: skip
def test_what_does_not_go_together_is_refused(settings, tmp_path):
    with pytest.raises(AssertionError, match=UserError.__name__):
        run_on_ranks(_train, 2, str(tmp_path / "run"), TOTAL, settings)
