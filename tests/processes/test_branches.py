"""Networks of which some updates use a part only, and optimizers that start, skip and change."""

import functools

import pytest
import torch
from torch import nn

from manyhands.config.job import TrainOptions
from manyhands.core.world import World
from manyhands.train.loop import fit
from manyhands.train.optimize import make_optimizer
from tests.processes.ranks import put_on_machines, run_on_ranks
from tests.processes.updates import EXACT, assert_alike, built, captured, train, trained


class Branches(nn.Module):
    """Samples that begin bright also go through a branch; the updates in `left_out` leave it out altogether."""

    def __init__(self, left_out=()):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.branch, self.head = nn.Linear(64, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.taken, self.left_out, self.passes = [], left_out, -1  # the rehearsal's comes before the first update's

    def forward(self, images):
        values = self.body(images.flatten(1))
        bright = images[:, 0, 0, 0] > 0.9
        self.passes += self.training
        if self.training and self.passes == 0:
            return self.head(self.branch(values))
        if bright.any() and self.passes not in self.left_out:
            self.taken.append(self.passes)
            values = torch.where(bright[:, None], self.branch(values), values)
        return self.head(values)


FEW = {"data.name": "synthetic:48x1x8x8x5", "data.augment": "none", "train.batch": 6}


def _train(world, mode, optimizer, machines=()):
    if machines:
        put_on_machines(machines, world)
    flags = {**FEW, **EXACT, "train.epochs": 1, "train.optimizer": optimizer, "parallel.mode": mode}
    with built(world, model := Branches(left_out=(1, 3)), flags) as trainer:
        fit(trainer)
        return captured(trainer).model, model.taken


@pytest.mark.parametrize(
    ("size", "mode", "optimizer", "machines"),
    [(2, "data", "sgd", ()), (2, "fsdp", "adamw", ()), (3, "data", "sgd", ()), (3, "data", "sgd", ((0, 1), (2,)))],
)
def test_branches_that_some_processes_or_updates_leave_out_train_as_on_one_process(size, mode, optimizer, machines):
    alone, _ = _train(World(), mode, optimizer)
    answers = run_on_ranks(_train, size, mode, optimizer, machines)
    assert answers[0][1] != answers[1][1]  # they took the branch in different updates
    assert answers[0][0].keys() == alone.keys()
    for found, _ in answers:
        assert_alike(found, {name: alone[name] for name in found}, 1e-9)  # under fsdp rank 0 alone gets them


def test_an_update_that_the_loss_scaler_skips_leaves_no_trace():
    network = nn.Linear(300, 300)
    before = network.weight.detach().clone()
    optimizer = make_optimizer(network, TrainOptions(), sharded=False)
    scaler = torch.amp.GradScaler("cpu")
    torch.use_deterministic_algorithms(True)  # has torch fill new memory with NaN
    try:
        for bad in (True, False):
            network.zero_grad()
            scaler.scale(network(torch.ones(2, 300)).sum()).backward()
            if bad:
                network.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(network.weight, before) == bad
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.isfinite(network.weight).all()
    assert torch.equal(optimizer.state[network.bias]["momentum_buffer"], torch.full((300,), 2.0))


def _frozen():
    model = Branches()
    model.body.requires_grad_(False)
    return model


def test_what_was_frozen_trains_once_it_is_no_longer_and_another_optimizer_starts_anew_with_a_message(tmp_path):
    makes = ((_frozen, "sgd"), (Branches, "sgd"), (Branches, "adamw"))
    frozen, thawed, other = (
        train(World(), 0, make, {**FEW, "train.max_steps": 2 * turn, "train.optimizer": name}, tmp_path)
        for turn, (make, name) in enumerate(makes, 1)
    )
    assert thawed.optimizer["body.weight momentum_buffer"].any()
    assert not torch.equal(frozen.model["body.weight"], thawed.model["body.weight"])
    assert not any("is reset" in message for message in thawed.said("note") + thawed.said())
    assert {f"head.weight {name}" for name in ("step", "exp_avg", "exp_avg_sq")} < other.optimizer.keys()
    assert "head.weight momentum_buffer" not in other.optimizer
    [said] = [event["message"] for event in other.events if "is reset" in event.get("message", "")]
    assert said.startswith("the state of adamw is reset")
    assert "momentum_buffer" in said


class Masked(nn.Module):
    """Has an attention's mask among its buffers, as many transformers do, and a buffer that is lost if asked to."""

    def __init__(self, *, lose=False):
        super().__init__()
        self.head = nn.Linear(8, 5)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("seen", torch.zeros(1))
        self.lose = lose

    def forward(self, images):
        if self.lose and self.training:
            self.seen += torch.nan
        rows = images[:, 0]
        return self.head((rows @ rows.transpose(1, 2) + self.mask).softmax(2).mean(1))


def test_masks_of_infinities_are_saved_and_what_was_lost_on_the_way_is_not(tmp_path):
    """Also by processes that train apart."""
    assert train(World(), 0, Masked, {**FEW, "train.max_steps": 2}, tmp_path / "run").first == 0
    assert train(World(), 0, Masked, {**FEW, "train.max_steps": 4}, tmp_path / "run").first == 2
    losing, few = functools.partial(Masked, lose=True), {**FEW, "train.max_steps": 2}
    lost = train(World(), 0, losing, few, tmp_path / "lost", ends=True)
    assert "buffer seen is not finite, although every loss was finite" in lost.ended
    local = {"sync.method": "local", "sync.every": 2, "sync.codec": "int8"}
    for found, _ in trained(2, [(0, Masked, {**FEW, **local, "train.max_steps": 4}, tmp_path / "apart")]):
        assert not any("could not save" in event["message"] for event in found.events if "message" in event)
