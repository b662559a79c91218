"""Small networks, and what comes of training them under a job, in a process of a group or alone."""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from manyhands.config.load import load_job
from manyhands.core.errors import ManyhandsError
from manyhands.core.run_folder import RunFolder
from manyhands.parallel.apply import follows_plan
from manyhands.parallel.mesh.placement import gather_full
from manyhands.parallel.plan import plan_from_options
from manyhands.train.build import build
from manyhands.train.loop import fit
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.train.state import capture
from manyhands.worker.entry import _build_trainer
from tests.processes.ranks import put_on_machines, run_on_ranks

# Divides by nothing: 103 = 3 * 29 + 16.
SAMPLES, BATCH = 103, 29
EXACT = {"train.precision": "fp64", "train.channels_last": False}
SMALL = {
    "data.name": f"synthetic:{SAMPLES}x1x8x8x5", "train.batch": BATCH, "train.epochs": 50, "train.lr": 0.05,
    "data.augment": "crop-flip", "model.num_classes": 5, "train.weight_decay": 1e-3,
}  # fmt: skip


def normed(norm=nn.BatchNorm2d):
    """A small network with BatchNorm."""
    torch.manual_seed(3)

    def block(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU()]

    return nn.Sequential(*block(1, 6), nn.MaxPool2d(2), *block(6, 8), nn.Flatten(), nn.Linear(8 * 16, 5))


def plain():
    return normed(nn.Identity)


def linear():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


class SyncedNetwork(nn.Module):
    """BatchNorm, dropout and a matrix that goes as factors; `idle`: also a frozen layer and one that is never used."""

    def __init__(self, *, idle=False, dropout=0.2, factor=1):
        super().__init__()
        torch.manual_seed(3)
        self.factor = factor
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout),
            nn.Linear(384, 12), nn.Linear(12, 5),
        )  # fmt: skip
        if idle:
            self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)
            self.unused = nn.Linear(2, 2)

    def forward(self, pictures):
        return self.factor * self.body(pictures)


class Of003(nn.Module):
    """Document 003's network; `times`: how often its sum is collected, once if it is right."""

    def __init__(self, mesh, times=1, mark=True):
        super().__init__()
        self.tp, self.times = mesh.axis("tp"), times
        whole = torch.rand(512, 128)
        self.weight = self.tp.shard(whole, 1) if mark else nn.Parameter(self.tp.shard(whole, 1).detach())

    def forward(self, x):
        x = (x @ self.weight).sum(-1)
        for _ in range(self.times):
            x = self.tp.all_reduce(x)
        return x


@contextlib.contextmanager
def built(world, model, flags, folder="", mode="", *, as_worker=False, **objects):
    """A trainer, which is closed at the end; its records are in the folder, or in one that leaves with it.

    The mode is the job's, or single on one process. `as_worker`: built as `manyhands train` does, which resolves what
    is measured.
    """
    job = load_job({"train.evaluate_every": 0.0, **flags}, environment={}).job
    mode = mode or ("single" if world.alone else "data" if job.parallel.mode == "auto" else job.parallel.mode)
    with tempfile.TemporaryDirectory() as temporary:
        place = RunFolder(Path(folder or temporary))
        place.failures.mkdir(parents=True, exist_ok=True)
        if as_worker:
            trainer = _build_trainer(job, place, world, {"live": Objects(model, **objects)})
        else:
            plan = plan_from_options(job.parallel, world.size) if follows_plan(mode) else None
            trainer = build(Parts.from_job(job, place, world, mode, Objects(model, **objects), plan))
        try:
            yield trainer
        finally:
            trainer.saver.wait()  # before the folder goes
            trainer.resources.close()


def updates(trainer, until):
    """Makes updates up to a step; yields each when it is made."""
    while trainer.progress.step < until:
        for update in trainer.feed.updates(trainer.progress.epoch, trainer.progress.step_in_epoch):
            trainer.updater(update, trainer.progress.step)
            trainer.progress.advance(trainer.feed.order.steps_per_epoch)
            yield update
            if trainer.progress.step == until:
                return


def make_updates(trainer, until):
    """The losses of this process in updates up to a step."""
    return [trainer.updater.measured.take_sums()[0] for _ in updates(trainer, until)]


def captured(trainer):
    """The snapshot of a trainer; of a sharded network rank 0's alone has tensors."""
    return capture(trainer.network, trainer.updater.optimizer, trainer.progress, {})


def assert_alike(found, wanted, tolerance=0.0, least=1e-12):
    """Compares tensors by name: to the bit, or relative to the largest value of each (of `least` at least)."""
    for name, one in wanted.items():
        if not tolerance or not one.numel():
            assert torch.equal(found[name], one), name
            continue
        scale = one.abs().max().item() if one.is_floating_point() else 1
        assert (found[name] - one).abs().max().item() <= tolerance * max(scale, least), name


class Outcome(NamedTuple):
    """What came of a training."""

    losses: list  # of this process's samples, by update
    model: dict  # the whole network's tensors
    evaluation: tuple  # counts and loss
    optimizer: dict  # tensors, by the parameter's name and their own; of FSDP's rank 0 alone has them
    first: int  # the step that it began at
    averages: str  # how gradients are averaged
    layouts: dict
    ended: str  # why it ended before its end, and where
    events: list  # what was noted
    metrics: list

    def said(self, kind="warning"):
        return [event["message"] for event in self.events if event["kind"] == kind]


def train(world, until, make, flags, folder="", machines=(), as_worker=False, *, ends=False, **objects):
    """Updates up to a step, or a whole run (0), of the network that `make` makes (None: the job's own).

    `machines`: ranks of those that processes are to believe in; `ends`: errors in the run are what is looked for.
    """
    if not world.alone:
        put_on_machines(machines or [range(world.size)], world)
    model = make() if make else None
    torch.manual_seed(3)
    losses, evaluation, ended = [], (), ""
    with built(world, model, {**SMALL, **flags}, folder, as_worker=as_worker, **objects) as trainer:
        first, network = trainer.progress.step, trainer.network
        try:
            losses = make_updates(trainer, until) if until else fit(trainer)
        except ManyhandsError as error:
            if not ends:
                raise
            ended = f"{error.message} | {error.where}"
        if not ended:
            trainer.verify_replicas()
        states = (captured(trainer).optimizer or {"state": {}})["state"]
        optimizer = {
            f"{name} {key}": full_tensor(name, value, network)
            for name, values in states.items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        model = {name: one for name, one in network.full_state_dict().items() if isinstance(one, torch.Tensor)}
        if not ended:
            counted = trainer.evaluate()
            evaluation = counted.confusion, counted.loss
        records = lines(trainer.folder.events), lines(trainer.folder.metrics)
    how = network.traits.averaging, dict(network.layouts), ended
    return Outcome(losses, model, evaluation, optimizer, first, *how, *records)


def full_tensor(name, tensor, network):
    """A tensor of the optimizer, or a gradient, from pieces as those of its parameter."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    split = network.layouts and tensor.ndim
    return (gather_full(tensor, network.layouts[name], network.grid) if split else tensor).cpu()


def lines(file):
    """The records of a file, if there is one."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def for_each(world, function, cases):
    return [function(world, *case) for case in cases]


def by_case(size, function, cases):
    """For each case what function(world, *case) returned on each process; all in one start."""
    return list(zip(*run_on_ranks(for_each, size, function, cases), strict=True))


def trained(size, cases):
    """By case, (until, make, flags, …), what came of it on each process."""
    return by_case(size, train, cases)
