"""A loop of the user's own under each sync method and mode: `fit`'s updates to the bit, and resuming likewise."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.utils.data import TensorDataset

from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.parallel.apply import resolve_mode
from manyhands.parallel.mesh.grid import open_mesh
from manyhands.sync.options import methods
from manyhands.train.loop import fit
from manyhands.train.session import Session
from manyhands.worker.run_metadata import write_metadata
from tests.processes.ranks import run_on_ranks
from tests.processes.test_session import opened
from tests.processes.updates import EXACT, SyncedNetwork, assert_alike, built, linear, lines, updates

# 48 samples in batches of 16 are 3 updates an epoch; the mean loss of a share is exact parts of the batch's then.
EPOCHS, STEPS = 3, 9
OF_METHODS = {"local": {"sync.every": 2, "sync.delay": 1, "sync.codec": "int4"}, "powersgd": {"sync.rank": 1}}
METHODS = {name: {"sync.method": name, **OF_METHODS.get(name, {})} for name in methods()}
MORE = {
    "no overlap": {**METHODS["local"], "sync.delay": 0, "sync.codec": "none"},
    "in parts": {**METHODS["powersgd"], "train.micro_batch": 2},
    "clipped": {**METHODS["powersgd"], "train.clip": 0.1},
    "scaled": {**METHODS["local"], "train.precision": "fp16"},
    "rounded": {**METHODS["bf16"], "train.precision": "bf16", "train.micro_batch": 4},
    "sums": {"parallel.gradients_mean": False},
    "fsdp": {"parallel.mode": "fsdp"},
    "semi": {"parallel.mode": "semi", "parallel.pin": ["body.5=o@dp", "loss=n@dp"]},
    "hybrid": {"parallel.mode": "hybrid"},
}
# By number of processes: each method and option at one of several; one process has no one to agree with.
CASES = {
    1: ["allreduce", "local", "in parts", "hybrid"],
    2: ["allreduce", "local", "in parts", "hybrid", "scaled", "fsdp"],
    3: ["bf16", "powersgd", "no overlap", "clipped", "rounded", "sums", "semi"],
}


class HalvedNetwork(nn.Module):
    """Split by hand over the axis tp."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(3)
        self.tp = mesh.axis("tp")
        self.up = self.tp.shard_module(nn.Linear(64, 12), weight=0, bias=0)
        self.down = self.tp.shard_module(nn.Linear(12, 5, bias=False), weight=1)

    def forward(self, pictures):
        return self.tp.all_reduce(self.down(torch.relu(self.up(self.tp.enter(pictures.flatten(1))))))


def _network(world, settings):
    if settings.get("parallel.mode") == "hybrid":
        return HalvedNetwork(open_mesh(f"tp={world.size}", world))
    # What isn't used is known where the network is tried first, which the exact method doesn't ask for.
    return SyncedNetwork(idle=settings.get("sync.method", "allreduce") != "allreduce")


def _data():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(48, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 5, (48,), generator=generator))


def _flags(settings, world):
    return {
        "data.name": "objects", "train.batch": 16, "train.epochs": EPOCHS, "train.lr": 0.05, "train.momentum": 0.9,
        "train.nesterov": False, "train.weight_decay": 0.0, "train.schedule": "constant", "train.warmup_epochs": 0,
        "train.label_smoothing": 0.0, "train.norm_group": "local", "train.evaluate_every": 1,
        "checkpoint.every": "4steps", "checkpoint.keep": 9,
        "parallel.mesh": f"tp={world.size}" if "hybrid" in settings.values() else "", **settings,
    }  # fmt: skip


def _opened(world, settings, folder):
    flags = {**_flags(settings, world), "run.out": str(folder)}
    del flags["train.schedule"]  # the optimizer's learning rate stays
    return opened(world, folder, **flags)


def _recorded(folder):
    """What plan.json says, and the loss of each epoch as it was recorded."""
    record = json.loads((Path(folder) / "plan.json").read_text())
    metrics = lines(Path(folder) / "metrics.jsonl")
    losses = {one["step"]: one["epoch_loss"] for one in metrics if one.get("epoch_loss") is not None}
    keys = ("exceptions", "sync", "mode", "shares", "averages", "layouts")
    return {key: record.get(key) for key in keys}, losses


CLASS_WEIGHTS = torch.tensor([5.0, 0.1, 1.0, 2.0, 0.5], dtype=torch.float64)


def _by_fit(world, folder, settings, loss=None):
    flags = {**_flags(settings, world), "run.out": str(folder)}
    objects = {"train_set": _data(), "test_set": _data(), "loss": loss}
    mode = resolve_mode(settings.get("parallel.mode", "data"), world)
    with built(world, _network(world, settings), flags, folder, mode, **objects) as trainer:
        write_metadata(trainer)
        fit(trainer)
        weights = trainer.network.full_state_dict()
        return weights, trainer.observed.evaluated.loss, _recorded(folder) if world.is_main else None


class Killed(Exception):  # noqa: N818 - not an error
    """The program is ended."""


def _by_loop(world, folder, settings, end_at=-1, loss=None):
    """The step at which the loop begins, weights, an evaluation's loss and what plan.json says; or it is killed."""
    net, job_mode, parts = _network(world, settings), settings.get("parallel.mode"), "train.micro_batch" in settings
    first = None
    with _opened(world, settings, folder) as here, contextlib.suppress(Killed):
        fused = world.alone or job_mode != "fsdp"
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, fused=fused)
        model, optimizer, samples = here.prepare(net, optimizer, _data(), batch=16)
        for _ in here.epochs(settings.get("train.epochs", EPOCHS)):
            for x, y in samples:
                first = here._prepared_trainer().progress.step if first is None else first
                optimizer.zero_grad() if parts else net.zero_grad()
                weight = [CLASS_WEIGHTS[y].sum()] if loss else []
                here.backward((loss or F.cross_entropy)(model(x), y), *weight)
                optimizer.step()
                if here._prepared_trainer().progress.step == end_at and not here._has_unfinished_update():
                    here.save()
                    raise Killed
            found = here.evaluate(model, _data())
        here.finish()
        weights = here.full_state_dict()
        here._prepared_trainer().verify_replicas()
        if not job_mode:
            assert_alike(dict(net.state_dict()), {name: weights[name] for name in net.state_dict()})
        return first, weights, found.loss, _recorded(folder) if world.is_main else None


def _by_fit_and_loop(world, folder, names):
    found = []
    for name in names:
        place, settings = folder / name, {**METHODS, **MORE}[name]
        found.append((_by_fit(world, place / "fit", settings), _by_loop(world, place / "loop", settings)))
        _by_loop(world, place / "killed", settings, 5)
    return found


def _resumed(world, folder, names):
    return [_by_loop(world, folder / name / "killed", {**METHODS, **MORE}[name]) for name in names]


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_session_equals_fit_under_each_sync_method_and_resumes_to_the_same_bits(size, tmp_path):
    assert {name for names in CASES.values() for name in names} == {*METHODS, *MORE}
    both = run_on_ranks(_by_fit_and_loop, size, tmp_path, CASES[size])
    resumed = run_on_ranks(_resumed, size, tmp_path, CASES[size])
    for of_rank, resumed_of_rank in zip(both, resumed, strict=True):
        for name, (by_fit, by_loop), again in zip(CASES[size], of_rank, resumed_of_rank, strict=True):
            weights, evaluated, recorded = by_fit
            _, own, own_evaluated, own_recorded = by_loop
            assert_alike(own, weights)
            assert own_evaluated == evaluated, name
            if recorded:
                (of_plan, losses), (own_of_plan, own_losses) = recorded, own_recorded
                assert own_of_plan == of_plan, name
                assert [*losses] == [3, 6, 9], name
                # A loop reports the mean of each share, `fit` the samples' sum, so that thirds are rounded.
                assert own_losses == pytest.approx(losses, rel=1e-6), name
            assert again[0] == 5, name
            assert_alike(again[1], own)


def _equal_after_updates(world, every):
    """Whether the processes' parameters are equal after each of nine updates."""
    found = []
    settings = {"sync.method": "local", "sync.every": every, "sync.delay": 0, "sync.codec": "none"}
    with built(world, SyncedNetwork(), _flags(settings, world), train_set=_data(), test_set=_data()) as trainer:
        for _ in updates(trainer, STEPS):
            own = torch.cat([one.detach().flatten() for one in trainer.network.model.parameters()])
            others = [torch.empty_like(own) for _ in range(world.size)]
            dist.all_gather(others, own)
            found.append(all(torch.equal(own, one) for one in others))
    return found


REFUSED = [
    ({"parallel.mode": "auto"}, SyncedNetwork, "sessions have their own loss", "find_plan"),
    ({"sync.method": "powersgd", "parallel.mode": "fsdp"}, SyncedNetwork, "fsdp can't be combined", "--parallel"),
    ({"sync.method": "powersgd", "train.precision": "fp16"}, SyncedNetwork, "doesn't support fp16", "bf16"),
    ({"sync.method": "local", "train.norm_group": "global"}, SyncedNetwork, "norm_group", "norm_group"),
    ({"sync.method": "bf16"}, linear, "failed on the two test samples", "model"),
]


def _refused(world):
    found = []
    for settings, make, match, _ in REFUSED:
        here, net = Session(world, load_job({"data.name": "objects", **settings}, environment={}).job), make()
        data = TensorDataset(torch.rand(48, 1, 3, 3), torch.arange(48) % 5) if make is linear else _data()
        with pytest.raises(UserError, match=match) as caught:
            here.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data, batch=16)
        found.append(" ".join([caught.value.message, *caught.value.hints]))
    return found


def _chosen(world, folder):
    """A method that is measured: by a link of a modem's speed, on which no update could send all gradients."""
    settings = {"sync.method": "auto", "sync.link": "100kbit", "sync.within": "process", "train.epochs": 100}
    net = SyncedNetwork(idle=True)
    with _opened(world, settings, folder) as here:
        here.prepare(net, torch.optim.SGD(net.parameters(), 0.05), _data(), batch=16)
        taken = here._prepared_trainer().sync.cost
    return taken.method, taken.codec, taken.every


def _weighted(world, folder):
    """Weights after updates of weighted means, by `fit`'s loss and by the user's own, under each method in parts."""
    loss, found = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), []
    for name in ("powersgd", "bf16", "local"):
        settings = {**METHODS[name], **EXACT, "train.micro_batch": 3, "train.epochs": 1}
        by_loop = _by_loop(world, folder / name / "loop", settings, loss=loss)
        found.append((_by_fit(world, folder / name / "fit", settings, loss)[0], by_loop[1]))
    return found


def _of_two(world, folder):
    every = {every: _equal_after_updates(world, every) for every in (2, 3)}
    return every, _refused(world), _chosen(world, folder / "chosen"), _weighted(world, folder)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """What two processes found, by what was tried; and their folder."""
    folder = tmp_path_factory.mktemp("two")
    return list(zip(*run_on_ranks(_of_two, 2, folder), strict=True)), folder


def test_local_steps_average_after_each_interval_counted_from_the_first_update(of_two):
    wanted = {every: [step % every == 0 for step in range(1, STEPS + 1)] for every in (2, 3)}
    assert of_two[0][0] == (wanted, wanted)


def test_what_a_loop_cannot_have_is_refused_with_the_line_that_does_it(of_two):
    first, second = of_two[0][1]
    assert first == second
    assert all(line in said for (*_, line), said in zip(REFUSED, first, strict=True))


def test_a_method_that_is_measured_is_one_for_all_and_kept(of_two):
    ((*_, (first, second), _), folder) = of_two
    assert first == second
    assert first[0] != "allreduce"
    recorded = json.loads((folder / "chosen" / "plan.json").read_text())
    assert recorded["sync"]["method"] == first[0]
    assert recorded["exceptions"][-1].startswith(("Local steps", "Compressed gradients", "Gradients are rounded"))


def test_weighted_means_are_divided_before_gradients_leave(of_two):
    for found in of_two[0][3]:
        for by_fit, weights in found:
            assert_alike(weights, by_fit, 1e-9, least=1e-3)
