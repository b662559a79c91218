"""The law of the house for networks that are cut by a plan: the same updates as one process, whatever goes with it."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint.read import load
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel.apply import check_replicas, follows_plan
from manyhands.parallel.plan import plan_of
from manyhands.train.build import build
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.train.saving import finish_save, save
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import BATCH, SAMPLES, network

PLANS = {
    "outputs": (2, "", ("0=o@dp", "1=c@dp", "8=o@dp", "loss=o@dp")),
    "inputs": (3, "", ("4=i@dp", "8=i@dp")),
    "two-axes": (4, "dp=2,tp=2", ("0=n@dp o@tp", "[1-7]=n@dp c@tp", "8=n@dp i@tp")),
    "crossed": (4, "dp=2,tp=2", ("0=o@dp n@tp", "4=n@dp,tp", "5=c@dp,tp", "loss=n@dp o@tp")),
    "samples": (2, "", ("*=n@dp",)),
}
SETTINGS = {
    "plain": {},
    "accumulation": {"train.micro_batch": 8},
    "adamw": {"train.optimizer": "adamw", "train.lr": 0.002},
    "clip": {"train.clip": 0.1, "train.label_smoothing": 0.1},
    "full-batch": {"parallel.full_batch": True},
}


def _job(plan, settings, out=""):
    _, mesh, pins = PLANS[plan] if plan else (1, "", ())
    flags = {
        "data.name": f"synthetic:{SAMPLES}x1x8x8x5", "train.batch": BATCH, "run.out": out,
        "train.epochs": 50, "train.lr": 0.05, "train.evaluate_every": 0.0, "model.num_classes": 5,
        "data.augment": "crop-flip", "train.weight_decay": 1e-3,
        "train.precision": "fp64", "train.channels_last": False, "train.norm_group": 8,
        "parallel.mode": "semi" if plan else "single", "parallel.mesh": mesh, "parallel.pin": pins, **settings,
    }  # fmt: skip
    return load_job(flags, environment={}).job


def _train(world, updates, plan, settings, folder="", resume=False):
    torch.manual_seed(3)
    job = _job(plan, {**settings, "checkpoint.resume": "auto" if resume else "never"})
    mode = job.parallel.mode
    with tempfile.TemporaryDirectory() as temporary:
        run = RunFolder(Path(folder or temporary))
        followed = plan_of(job.parallel, world.size) if follows_plan(mode) else None
        trainer = build(Parts.from_job(job, run, world, mode, Objects(network(True)), followed))
        losses = []
        while len(losses) < updates:
            for update in trainer.feed.updates(trainer.progress.epoch, trainer.progress.step_in_epoch):
                trainer.updater(update, trainer.progress.step)
                trainer.progress.advance(trainer.feed.order.steps_per_epoch)
                losses.append(trainer.updater.measured.take()[0])
                if len(losses) == updates:
                    break
        if trainer.network.layouts:
            named = dict(trainer.network.model.state_dict())
            check_replicas(named, world, trainer.progress.step, trainer.network)
        evaluation = trainer.evaluate()
        save(trainer)
        finish_save(trainer)
        saved = load(next(iter(run.checkpoints.glob(f"step-{trainer.progress.step:08d}")))) if world.is_main else None
        trainer.resources.close()
    return losses, saved, (evaluation.confusion, evaluation.loss)


@pytest.mark.parametrize(("mode", "why"), [("single", "nothing to split"), ("data", "splits no ops")])
def test_a_pin_under_a_mode_that_splits_nothing_is_refused(mode, why, tmp_path):
    job = _job("samples", {"parallel.mode": "data"})
    with pytest.raises(UserError, match=why):
        build(Parts.from_job(job, RunFolder(tmp_path), World(), mode, Objects(network(True))))


def _same(got, wanted, tolerance=1e-9):
    for name, tensor in wanted.model.items():
        scale = max(tensor.abs().max().item(), 1e-6) if tensor.is_floating_point() else 1
        assert (got.model[name] - tensor).abs().max().item() <= tolerance * scale, name
    for name, entries in wanted.optimizer["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                scale = max(value.abs().max().item(), 1e-6)
                assert (got.optimizer["state"][name][key] - value).abs().max().item() <= tolerance * scale, (name, key)


@functools.cache
def _alone(settings):
    return run_on_ranks(_train, 1, 6, "", SETTINGS[settings])[0]


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        pytest.param(plan, settings, marks=[] if settings == "plain" or plan == "two-axes" else pytest.mark.slow)
        for plan in PLANS
        for settings in SETTINGS
    ],
)
def test_a_cut_network_makes_the_updates_of_one_process(plan, settings):
    alone = _alone(settings)
    several = run_on_ranks(_train, PLANS[plan][0], 6, plan, SETTINGS[settings])
    summed = [sum(losses) for losses in zip(*(result[0] for result in several), strict=True)]
    torch.testing.assert_close(torch.tensor(summed), torch.tensor(alone[0]), rtol=1e-9, atol=0)
    _same(several[0][1], alone[1])
    for result in several:
        assert torch.equal(result[2][0], alone[2][0])
        assert result[2][1] == pytest.approx(alone[2][1], rel=1e-9)


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize(("first", "second"), [("outputs", "two-axes"), ("crossed", ""), ("", "inputs")])
def test_a_run_goes_on_under_another_plan(first, second, pieces):
    settings = {"checkpoint.pieces": pieces}
    undisturbed = run_on_ranks(_train, 1, 8, "", {})[0]
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(_train, PLANS[first][0] if first else 1, 5, first, settings, folder)
        resumed = run_on_ranks(_train, PLANS[second][0] if second else 1, 3, second, settings, folder, True)
    _same(resumed[0][1], undisturbed[1])
    assert torch.equal(resumed[0][2][0], undisturbed[2][0])
