"""An update of a small network is mostly Python: how much of it there is, and that leaving some out changes nothing."""

import functools
import pickle
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.config.job import Job, TrainOptions
from manyhands.core.run_folder import NOWHERE
from manyhands.core.world import World
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.network import ParallelNetwork, full_batch
from manyhands.train import optimize
from manyhands.train.journal import Journal, RunContext
from manyhands.train.loss import make_loss_fn
from manyhands.train.step import PartialUpdate, StepSums, Updater

# Those of the network and the loss, some 30, are among them.
MOST_CALLS = 122


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def _mixed(kinds):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(37, 5, dtype=kind) for kind in kinds)


def _updater(model):
    options = TrainOptions()
    optimizer = optimize.make_optimizer(model, options, sharded=False)
    run = RunContext(Job(train=options), NOWHERE, World(), Journal(NOWHERE, 0), "single")
    return Updater(run, ParallelNetwork(model), optimizer, make_loss_fn(options), lambda _: None)


def test_an_update_makes_few_calls():
    update = _updater(_network())
    share = [full_batch(torch.randn(2, 1, 4, 4), torch.tensor([1, 2]))]
    calls = []
    for number in range(3):  # the first one imports
        calls.clear()
        sys.setprofile(lambda frame, kind, _: calls.append(frame.f_code.co_qualname) if kind == "call" else None)
        update(share, number)
        sys.setprofile(None)
    assert len(calls) <= MOST_CALLS, calls


class _Draws(nn.Module):
    def forward(self, inputs):
        return inputs * random.random() + np.random.rand()


class _Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


def _drawn(model, step):
    _updater(model).begin(step)
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_what_is_drawn_follows_from_the_step_unless_nobody_draws_it():
    of_torch = _network()
    for others in (_network().append(_Draws()), _network().append(nn.Dropout())):
        others[-1].register_forward_hook(lambda *_: None)
        assert _drawn(others, 1) == _drawn(others, 1) != _drawn(others, 2)
    first, again = _drawn(of_torch, 1), _drawn(of_torch, 1)
    assert first[2] == again[2] != _drawn(of_torch, 2)[2]
    assert first[:2] != again[:2]  # nobody asks for these, so they take no time


def test_a_function_that_writes_to_its_gradient_spoils_no_later_one():
    model, found = _network(), []
    gradients = Gradients(ParallelNetwork(model), World())
    for _ in range(3):
        model.zero_grad()
        gradients.backward_custom_loss(_Writes.apply(model(torch.ones(5, 16)).sum()), 0.3)
        found.append([one.grad.clone() for one in model.parameters()])
    assert all(torch.equal(one, first) for each in found for one, first in zip(each, found[0], strict=True))


@pytest.mark.parametrize("most", [1, 1 << 16])
def test_what_was_measured_since_a_mark_is_forgotten(monkeypatch, most):
    monkeypatch.setattr("manyhands.train.feed.COUNTED_AT_ONCE", most)
    sums, right, wrong = StepSums(), torch.eye(3), torch.eye(3).flip(1)
    labels = torch.arange(3)
    sums.add_predictions(right, labels)
    mark = sums.copy_sums()
    sums.add_predictions(wrong, labels)
    sums.add_predictions(right, labels)
    sums.restore_sums(mark)
    sums.add_predictions(right, labels)
    assert sums.take_sums()[1] == 6


@pytest.mark.parametrize("weight", [0.3, torch.tensor(0.3, dtype=torch.float64)])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_a_weight_is_given_to_backward_to_the_last_bit(weight, shape, kind):
    ours, others = _network().to(kind), _network().to(kind)
    inputs = torch.randn(5, 16, dtype=kind)
    Gradients(ParallelNetwork(ours), World()).backward_custom_loss(ours(inputs).pow(2).sum().view(shape), weight)
    (others(inputs).pow(2).sum() * (weight.to(kind) if isinstance(weight, torch.Tensor) else weight)).backward()
    for one, other in zip(ours.parameters(), others.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("options", "torchs"),
    [
        ({"momentum": 0.0}, torch.optim.SGD),
        ({"momentum": 0.9}, functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True)),
        ({"optimizer": "adamw"}, torch.optim.AdamW),
    ],
)
@pytest.mark.parametrize("kinds", [(torch.float32,) * 3, (torch.float32, torch.float64, torch.float32)])
def test_an_update_of_ours_is_torchs_to_the_last_bit(options, torchs, kinds):
    ours, others = (_mixed(kinds) for _ in range(2))
    optimizer = optimize.make_optimizer(ours, TrainOptions(lr=0.1, weight_decay=0.01, **options), sharded=False)
    twins = {id(one): twin for one, twin in zip(ours.parameters(), others.parameters(), strict=True)}
    groups = [{**group, "params": [twins[id(one)] for one in group["params"]]} for group in optimizer.param_groups]
    other, hooked = torchs(groups, lr=0.1, fused=True), []
    assert isinstance(optimizer, type(other))
    assert type(pickle.loads(pickle.dumps(optimizer))) is type(optimizer)
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for step in range(6):
        for network in (ours, others):
            for place, one in enumerate(network.parameters()):
                torch.manual_seed(100 * step + place)
                # One has no gradient now and then, which torch leaves out.
                one.grad = torch.randn_like(one) if (step + place) % 3 or not step else None
        optimizer.step()
        other.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert len(hooked) == 6
    for one, another in zip(ours.parameters(), others.parameters(), strict=True):
        assert torch.equal(one, another)


class _Grows(nn.Module):
    """Puts a longer buffer in the place of one; `removes`: or none."""

    def __init__(self, *, removes):
        super().__init__()
        self.removes = removes
        self.register_buffer("seen", torch.zeros(0, 2), persistent=False)

    def forward(self, values):
        self.seen = None if self.removes else torch.cat([self.seen, values])


@pytest.mark.parametrize("removes", [False, True])
def test_buffers_that_a_module_resizes_or_removes_are_put_back_with_an_update_that_is_undone(removes):
    layer = _Grows(removes=removes)
    under_way = PartialUpdate(ParallelNetwork(layer))
    under_way.begin()
    layer(torch.ones(1, 2))
    under_way.undo()
    assert layer.seen.shape == (0, 2)
    layer(torch.ones(1, 2))
    under_way.begin()  # the next update, of what has another size now


# How long a job trains, and what its optimizer keeps: figures that plans, sync methods and training share.
@pytest.mark.parametrize(
    ("options", "total", "made"),
    [
        ({"epochs": 3}, 30, 30),
        ({"epochs": 3, "start_epoch": 1}, 30, 20),
        # max_steps counts from the first epoch, as the run's own end does.
        ({"epochs": 3, "start_epoch": 1, "max_steps": 15}, 15, 5),
        ({"epochs": 3, "max_steps": 99}, 30, 30),
        ({"epochs": 3, "start_epoch": 3}, 30, 1),
        ({"epochs": 2, "batch": 200}, 20, 2),  # a batch is no larger than the data
    ],
)
def test_updates_of_a_job(options, total, made):
    train = TrainOptions(**{"batch": 10, **options})
    assert optimize.total_steps(train, 10) == total
    assert optimize.count_updates(train, 98) == made


@pytest.mark.parametrize("decays", [False, True])
def test_biases_move_by_a_multiple_of_the_rate_and_decay_as_weights_do(decays):
    """Without momentum: of weight 1 and gradient 1, p - r lr - lr decay p."""
    model = nn.Linear(1, 1)
    train = TrainOptions(
        lr=0.5, momentum=0.0, weight_decay=0.25, bias_rate=8.0, decay_norm_and_bias=decays, schedule="constant"
    )
    optimizer = optimize.make_optimizer(model, train, sharded=False)
    optimize.make_schedule(optimizer, train, 10)(0)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert model.weight.item() == 1 - 0.5 - 0.5 * 0.25
    assert model.bias.item() == 1 - 4.0 - (0.5 * 0.25 if decays else 0)
    assert optimize.largest_learning_rate(optimizer) == 0.5


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.0}, {"optimizer": "adamw"}])
def test_slots_are_what_the_optimizer_keeps(options):
    train = TrainOptions(**options)
    model = nn.Linear(3, 2)
    state = optimize.make_optimizer(model, train, sharded=False).state[model.weight]
    assert optimize.state_values_per_parameter(train) == sum(
        tensor.shape == model.weight.shape for tensor in state.values()
    )


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimizer": "adamw"}])
def test_a_restored_optimizer_makes_the_updates_of_the_saved_one_in_any_memory_format(options):
    """Fused optimizers read memory in order, whatever the strides of what they are given."""

    def made():
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, optimize.make_optimizer(model, TrainOptions(lr=0.1, **options), sharded=False)

    def update(model, optimizer):
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
        optimizer.step()

    first, optimizer = made()
    update(first, optimizer)
    state = {  # as a checkpoint has it: contiguous
        name: {key: one.contiguous().clone() for key, one in optimizer.state[parameter].items()}
        for name, parameter in first.named_parameters()
    }
    second, other = made()
    second.load_state_dict(first.state_dict())
    optimize.restore_optimizer({"state": state, "param_groups": optimizer.state_dict()["param_groups"]}, second, other)
    strides = {one.stride() for one in other.state[second.weight].values() if one.ndim == 4}
    assert strides == {second.weight.stride()}
    update(first, optimizer)
    update(second, other)
    for one, another in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, another, rtol=0, atol=0)
