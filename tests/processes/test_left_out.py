"""An update whose loss or gradient isn't finite is left out by all processes alike, and costs nothing but itself."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from manyhands.config.load import load_job
from manyhands.core.errors import RunError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel.apply import follows_plan
from manyhands.parallel.plan import plan_of
from manyhands.train.build import build
from manyhands.train.loop import fit
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from tests.processes.ranks import run_on_ranks

SAMPLES, BATCH, EPOCHS = 60, 12, 4
PER_EPOCH = SAMPLES // BATCH


class Spoils(torch.autograd.Function):
    """Its gradient is infinite where a sample's first value is above 50."""

    @staticmethod
    def forward(ctx, values, images):
        ctx.spoils = bool((images.flatten(1)[:, 0] > 50).any())
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (float("inf") if ctx.spoils else 1.0), None


class Net(nn.Module):
    """BatchNorm, and a buffer of its own that every forward in training moves."""

    def __init__(self, *, spoils):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head, self.spoils = nn.Linear(4 * 64, 5), spoils
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, images):
        if self.training and self.spoils:
            self.passes += 1
        found = self.head(self.body(images))
        return Spoils.apply(found, images) if self.spoils else found


def data(bad, value=float("nan")):
    """Some samples' first pixel is no number, or one that spoils gradients."""
    images = torch.rand(SAMPLES, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for sample in bad:
        images[sample, 0, 0, 0] = value
    return TensorDataset(images, torch.arange(SAMPLES) % 5)


def made(world, place, mode="data", sync="allreduce", settings=None, bad=(17,), value=float("nan"), spoils=False):
    """A trainer with its records in a folder."""
    torch.manual_seed(0)
    flags = {
        "train.batch": BATCH, "train.epochs": EPOCHS, "train.precision": "fp64", "train.evaluate_every": 0.0,
        "sync.method": sync, "sync.every": 2, "sync.codec": "none", "parallel.mode": mode, "train.channels_last": False,
        "run.log_every_s": 0.01, **(settings or {}),
    }  # fmt: skip
    job = load_job(flags, environment={}).job
    folder = RunFolder(Path(place))
    folder.ranks.mkdir()
    objects = Objects(Net(spoils=spoils).double(), train_set=data(bad, value), test_set=data(()))
    followed = plan_of(job.parallel, world.size) if follows_plan(mode) else None
    return build(Parts.from_job(job, folder, world, mode, objects, followed))


def trained(world, *how, **others):
    """Weights, steps that were left out, and what ended the run."""
    with tempfile.TemporaryDirectory() as place:
        trainer = made(world, place, *how, **others)
        folder, said = trainer.folder, ""
        try:
            fit(trainer)
        except RunError as error:
            said = f"{error.message} | {error.where}"
        weights = trainer.network.full_state_dict()
        lines = folder.events.read_text().splitlines() if folder.events.exists() else []
        records = folder.metrics.read_text().splitlines() if folder.metrics.exists() else []
        trainer.resources.close()
    left_out = [event["step"] for event in map(json.loads, lines) if event["kind"] == "left-out"]
    counted = sum(one["samples"] for one in map(json.loads, records) if one["kind"] == "step")
    return weights, left_out, said, counted


def equal(weights, truth, within=1e-9):
    return all(
        (one - truth[name]).abs().max() <= within * truth[name].abs().max() + 1e-12 for name, one in weights.items()
    )


WAYS = {
    "through memory": ("data", {}),
    "by gloo": ("data", {"parallel.shared_memory": False}),
    "in several passes": ("data", {"train.micro_batch": 2, "train.norm_group": 2}),
    "clipped": ("data", {"train.clip": 0.5}),
    "fsdp": ("fsdp", {}),
    "cut by samples": ("semi", {"parallel.pin": ("*=n@dp",)}),
    "cut by outputs": ("semi", {"parallel.pin": ("head=o@dp", "loss=o@dp")}),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_epochs_bad_update_is_left_out_alike_in_every_mode(way):
    mode, settings = WAYS[way]
    alone = {key: value for key, value in settings.items() if not key.startswith("parallel.")}
    truth, left_out, said, counted = trained(World(), "single", settings=alone)
    assert not said
    assert len(left_out) == EPOCHS
    assert counted == EPOCHS * (SAMPLES - BATCH)
    assert all(one.isfinite().all() for one in truth.values())
    results = run_on_ranks(trained, 2, mode, "allreduce", settings)
    assert results[0][1] == left_out
    assert results[0][3] == counted
    for weights, _, ended, _ in results:
        assert not ended
        assert equal(weights, truth)


@pytest.mark.parametrize("mode", ["data", "fsdp"])
def test_a_gradient_that_is_lost_is_heard_of_by_all(mode):
    truth, left_out, said, _ = trained(World(), "single", value=100.0, spoils=True)
    assert not said
    assert len(left_out) == EPOCHS
    # The buffer that every forward moves hasn't moved in an update that was left out.
    assert truth["passes"] < EPOCHS * PER_EPOCH + 4
    results = run_on_ranks(trained, 2, mode, "allreduce", None, (17,), 100.0, True)
    assert results[0][1] == left_out
    for weights, _, ended, _ in results:
        assert not ended
        assert equal({name: one for name, one in weights.items() if name != "passes"}, truth)


@pytest.mark.parametrize("sync", ["powersgd", "local", "bf16"])
def test_no_sync_method_carries_it_on(sync):
    results = run_on_ranks(trained, 2, "data", sync)
    for weights, _, ended, _ in results:
        assert not ended
        assert all(one.isfinite().all() for one in weights.values())
        assert equal(weights, results[0][0], 0.0)


def test_an_update_left_out_changes_nothing_at_all():
    """The first one of a run that ends there: the weights are those that it began with."""
    before, _, _, _ = trained(World(), "single", bad=(), settings={"train.max_steps": 1, "train.lr": 1e-300})
    after, left_out, _, counted = trained(World(), "single", bad=range(SAMPLES), settings={"train.max_steps": 1})
    assert (left_out, counted) == ([1], 0)
    assert torch.equal(before["head.weight"], after["head.weight"])
    assert not after["body.1.num_batches_tracked"]


def test_the_third_in_a_row_ends_the_run_with_the_last_good_weights():
    for weights, left_out, said, _ in run_on_ranks(trained, 2, "data", "allreduce", None, range(SAMPLES)):
        assert left_out in ([1, 2], [])
        assert "the input pictures contain NaN" in said
        assert "the last 3 updates were skipped | rank 0, step 2, samples " in said
        assert all(one.isfinite().all() for one in weights.values())


def test_the_first_ends_it_where_that_is_asked_for():
    _, left_out, said, _ = trained(World(), "single", settings={"train.stop_after_bad": 1}, bad=range(SAMPLES))
    assert not left_out
    assert "in a row" not in said
    assert "rank 0, step 0, samples " in said


def broken_off(world, last):
    """What an update has changed that ends while its last results are exchanged, and is undone."""
    with tempfile.TemporaryDirectory() as place:
        trainer = made(world, place, bad=(), spoils=True)
        updates, updater = trainer.feed.updates(0, 0), trainer.updater
        updater(next(updates), 0)
        before = {name: tensor.clone() for name, tensor in trainer.network.model.state_dict().items()}

        def ends(*_):
            raise ConnectionError("the peer has gone")

        if last == "buffers":
            updater._share_buffers = ends
        else:
            trainer.network.norms.finish_update = ends
        with pytest.raises(ConnectionError):
            updater(next(updates), 1)
        assert not updater.partial_update.in_pieces
        updater.partial_update.undo()
        trainer.resources.close()
        return [n for n, tensor in trainer.network.model.state_dict().items() if not torch.equal(tensor, before[n])]


@pytest.mark.parametrize("last", ["buffers", "statistics"])
def test_an_update_whose_peer_goes_in_its_last_collective_changes_nothing(last):
    assert run_on_ranks(broken_off, 2, last) == [[], []]
