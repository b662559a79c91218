"""A loop of the user's own under each sync method and mode: `fit`'s updates to the bit, and going on likewise."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.utils.data import TensorDataset

from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.parallel.apply import resolve_mode
from manyhands.parallel.mesh.grid import open_mesh
from manyhands.parallel.plan import shared_plan
from manyhands.sync.options import methods
from manyhands.train.build import build
from manyhands.train.loop import fit
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.train.session import Session
from manyhands.worker.run_metadata import write_metadata
from tests.processes.ranks import run_on_ranks

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
QUICK_CASES = {*METHODS, "in parts", "semi", "hybrid"}
CASES = [
    pytest.param(name, size, marks=[] if size == 2 and name in QUICK_CASES else pytest.mark.slow)
    for name in [*METHODS, *MORE]
    for size in (1, 2, 3)
    if (name, size) != ("semi", 1)  # one process has nothing to split
]


class SyncedNetwork(nn.Module):
    """With BatchNorm, dropout, a matrix that goes as factors, and, if asked to, a layer that is never used."""

    def __init__(self, *, unused=False):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(384, 12), nn.Linear(12, 5),
        )  # fmt: skip
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, pictures):
        return self.body(pictures)


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
    return SyncedNetwork(unused=settings.get("sync.method", "allreduce") != "allreduce")


def _data():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(48, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 5, (48,), generator=generator))


def _job(settings, folder, world):
    flags = {
        "data.name": "objects", "train.batch": 16, "train.epochs": EPOCHS, "train.lr": 0.05, "train.momentum": 0.9,
        "train.nesterov": False, "train.weight_decay": 0.0, "train.schedule": "constant", "train.warmup_epochs": 0,
        "train.label_smoothing": 0.0, "train.norm_group": "local", "checkpoint.every": "4steps", "checkpoint.keep": 9,
        "run.out": folder, "parallel.mesh": f"tp={world.size}" if "hybrid" in settings.values() else "", **settings,
    }  # fmt: skip
    place = RunFolder(Path(folder))
    place.failures.mkdir(parents=True, exist_ok=True)
    return load_job(flags, environment={}).job, place


def _told(folder):
    record = json.loads((Path(folder) / "plan.json").read_text())
    return {key: record.get(key) for key in ("exceptions", "sync", "mode", "shares", "averages", "layouts")}


def _by_fit(world, folder, settings):
    job, place = _job(settings, folder, world)
    plan = shared_plan(job.parallel, world) if job.parallel.mode == "semi" and not world.alone else None
    objects = Objects(_network(world, settings), train_set=_data(), test_set=_data())
    trainer = build(Parts.from_job(job, place, world, resolve_mode(job.parallel.mode, world), objects, plan))
    write_metadata(trainer)
    fit(trainer)
    weights = trainer.network.full_state_dict()
    evaluated = trainer.observed.evaluated.loss
    trainer.resources.close()
    return weights, evaluated, _told(folder) if world.is_main else None


class Killed(Exception):  # noqa: N818 - not an error
    """The program is ended."""


def _by_loop(world, folder, settings, end_at=-1):
    job, place = _job(settings, folder, world)
    here, net = Session(world, job, place, write_metadata=write_metadata), _network(world, settings)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, fused=world.alone or job.parallel.mode != "fsdp")
    model, optimizer, samples = here.prepare(net, optimizer, _data(), batch=16)
    first, found = None, None
    try:
        for _ in here.epochs(EPOCHS):
            for x, y in samples:
                first = here._ready().progress.step if first is None else first
                net.zero_grad() if not job.train.micro_batch else optimizer.zero_grad()
                here.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                if here._ready().progress.step == end_at and not here._unfinished():
                    here.save()
                    raise Killed
            found = here.evaluate(model, _data())
        here.finish()
    except Killed:
        here.close()
        return first, None, None, None
    weights = here.full_state_dict()
    here._ready().verify_replicas()
    here.close()
    own = (
        {name: one.detach().clone() for name, one in net.state_dict().items()}
        if "parallel.mode" not in settings
        else {}
    )
    assert all(torch.equal(own[name], weights[name]) for name in own)
    return first, weights, found.loss, _told(folder) if world.is_main else None


def _same(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_loop_makes_fits_updates_under_each_method_and_goes_on_to_the_same_bits(name, size, tmp_path):
    settings = {**METHODS, **MORE}[name]
    by_fit = run_on_ranks(_by_fit, size, str(tmp_path / "fit"), settings)
    by_loop = run_on_ranks(_by_loop, size, str(tmp_path / "loop"), settings)
    for (weights, evaluated, told), (_, own, own_evaluated, own_told) in zip(by_fit, by_loop, strict=True):
        assert _same(weights, own) == []
        assert own_evaluated == evaluated
        assert own_told == told
    run_on_ranks(_by_loop, size, str(tmp_path / "killed"), settings, 5)
    for whole, again in zip(by_loop, run_on_ranks(_by_loop, size, str(tmp_path / "killed"), settings), strict=True):
        assert again[0] == 5
        assert _same(whole[1], again[1]) == []


def _refused(world, settings, match, network=SyncedNetwork):
    job = load_job({"data.name": "objects", **settings}, environment={}).job
    here, net = Session(world, job), network()
    with pytest.raises(UserError, match=match) as caught:
        here.prepare(net, torch.optim.SGD(net.parameters(), 0.1), _data(), batch=16)
    return [caught.value.message, *caught.value.hints]


@pytest.mark.parametrize(
    ("settings", "network", "match", "line"),
    [
        ({"parallel.mode": "auto"}, SyncedNetwork, "sessions have their own loss", "find_plan"),
        ({"sync.method": "powersgd", "parallel.mode": "fsdp"}, SyncedNetwork, "fsdp can't be combined", "--parallel"),
        ({"sync.method": "powersgd", "train.precision": "fp16"}, SyncedNetwork, "doesn't support fp16", "bf16"),
        ({"sync.method": "bf16"}, lambda: nn.Linear(64, 5), "failed on the two test samples", "model"),
    ],
    ids=["auto", "mode", "precision", "shape"],
)
def test_what_a_loop_cannot_have_is_refused_with_the_line_that_does_it(settings, network, match, line):
    said = run_on_ranks(_refused, 2, settings, match, network)
    assert said[0] == said[1]
    assert line in said[0][-1] or line in said[0][1]


def _chosen(world, folder):
    """A method that is measured: by a link of a modem's speed, on which no update could send all gradients."""
    settings = {"sync.method": "auto", "sync.link": "100kbit", "sync.within": "process", "train.epochs": 100}
    job, place = _job(settings, folder, world)
    here, net = Session(world, job, place, write_metadata=write_metadata), SyncedNetwork(unused=True)
    here.prepare(net, torch.optim.SGD(net.parameters(), 0.05), _data(), batch=16)
    taken = here._ready().sync.cost
    here.close()
    return taken.method, taken.codec, taken.every


def test_a_method_that_is_measured_is_one_for_all_and_kept(tmp_path):
    first = run_on_ranks(_chosen, 2, str(tmp_path))
    assert first[0] == first[1]
    assert first[0][0] != "allreduce"
    told = json.loads((tmp_path / "plan.json").read_text())
    assert told["sync"]["method"] == first[0][0]
    assert told["exceptions"][-1].startswith(("Local steps", "Compressed gradients", "Gradients are rounded"))


CLASS_WEIGHTS = torch.tensor([5.0, 0.1, 1.0, 2.0, 0.5], dtype=torch.float64)
WEIGHTED = {
    "powersgd": METHODS["powersgd"],
    "powersgd in parts": {**METHODS["powersgd"], "train.micro_batch": 3},
    "bf16 in parts": {**METHODS["bf16"], "train.micro_batch": 3},
    "local in parts": {**METHODS["local"], "train.micro_batch": 3},
}


def _weighted(world, folder, settings):
    """The weights after updates of weighted means, by `fit`'s loss and by the user's own."""
    settings = {**settings, "train.precision": "fp64", "train.channels_last": False, "train.epochs": 1}
    job, place = _job(settings, f"{folder}/fit", world)
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)
    objects = Objects(SyncedNetwork(), train_set=_data(), test_set=_data(), loss=loss)
    trainer = build(Parts.from_job(job, place, world, resolve_mode("data", world), objects))
    fit(trainer)
    by_fit = trainer.network.full_state_dict()
    trainer.resources.close()
    here, net = Session(world, *_job(settings, f"{folder}/loop", world)), SyncedNetwork()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, fused=True)
    model, optimizer, samples = here.prepare(net, optimizer, _data(), batch=16)
    for _ in here.epochs(1):
        for x, y in samples:
            here.backward(loss(model(x), y), CLASS_WEIGHTS[y].sum())
            optimizer.step()
    weights = here.full_state_dict()
    here.close()
    return by_fit, weights


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_means_are_divided_before_gradients_leave(name, tmp_path):
    for by_fit, weights in run_on_ranks(_weighted, 2, str(tmp_path), WEIGHTED[name]):
        torch.testing.assert_close(weights, by_fit, rtol=1e-9, atol=1e-12)


def _shaped_by_the_loop(world):
    flags = {"data.name": "objects", "train.precision": "fp64"}
    here, net = Session(world, load_job(flags, environment={}).job), nn.Linear(64, 5)
    data = TensorDataset(_data().tensors[0].double(), _data().tensors[1])
    model, optimizer, samples = here.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data, batch=16)
    for x, y in samples:
        here.backward(F.cross_entropy(model(x.flatten(1)), y))
        optimizer.step()
    loss = here.mean_loss()
    here.close()
    return loss


def test_a_loop_may_shape_its_samples_on_three_processes():
    wanted = []
    for size in (1, 3):
        torch.manual_seed(3)
        wanted += run_on_ranks(_shaped_by_the_loop, size)
    assert wanted == pytest.approx([wanted[0]] * 4, rel=1e-9)
