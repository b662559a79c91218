"""How long a job trains, and how much its optimizer keeps: figures that plans, sync methods and training share."""

import functools
import pickle

import pytest
import torch

from manyhands.config.job import TrainOptions
from manyhands.train.optimize import (
    largest_rate,
    make_optimizer,
    make_schedule,
    restore_optimizer,
    slots_of,
    steps_to_make,
    total_steps,
)


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
    assert total_steps(train, 10) == total
    assert steps_to_make(train, 98) == made


@pytest.mark.parametrize("decays", [False, True])
def test_biases_move_by_a_multiple_of_the_rate_and_decay_as_weights_do(decays):
    """Without momentum: of weight 1 and gradient 1, p - r lr - lr decay p."""
    model = torch.nn.Linear(1, 1)
    train = TrainOptions(
        lr=0.5, momentum=0.0, weight_decay=0.25, bias_rate=8.0, decay_norm_and_bias=decays, schedule="constant"
    )
    optimizer = make_optimizer(model, train, sharded=False)
    make_schedule(optimizer, train, 10)(0)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert model.weight.item() == 1 - 0.5 - 0.5 * 0.25
    assert model.bias.item() == 1 - 4.0 - (0.5 * 0.25 if decays else 0)
    assert largest_rate(optimizer) == 0.5


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.0}, {"optimizer": "adamw"}])
def test_slots_are_what_the_optimizer_keeps(options):
    train = TrainOptions(**options)
    model = torch.nn.Linear(3, 2)
    state = make_optimizer(model, train, sharded=False).state[model.weight]
    assert slots_of(train) == sum(tensor.shape == model.weight.shape for tensor in state.values())


def _after_updates(model, optimizer):
    """Weights after five updates between which the state goes through `state_dict`; hooks are called in each."""
    torch.manual_seed(0)
    inputs, hooked = torch.randn(8, 3), []
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).pow(2).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert len(hooked) == 5
    return [*model.parameters()]


@pytest.mark.parametrize(
    ("options", "torchs"),
    [
        ({"momentum": 0.9}, functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)),
        ({"optimizer": "adamw"}, functools.partial(torch.optim.AdamW, lr=0.01)),
    ],
)
def test_our_optimizers_are_torchs_own(options, torchs):
    ours, others = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    train = TrainOptions(lr=0.01, weight_decay=0.02, decay_norm_and_bias=True, **options)
    optimizer, other = make_optimizer(ours, train, sharded=False), torchs(others.parameters(), weight_decay=0.02)
    assert type(optimizer).__name__ == type(other).__name__
    assert isinstance(optimizer, type(other))
    assert type(pickle.loads(pickle.dumps(optimizer))) is type(optimizer)
    torch.testing.assert_close(_after_updates(ours, optimizer), _after_updates(others, other), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimizer": "adamw"}])
def test_a_restored_optimizer_makes_the_updates_of_the_saved_one_in_any_memory_format(options):
    """Fused optimizers read memory in order, whatever the strides of what they are given."""
    train, models = TrainOptions(lr=0.1, **options), list[torch.nn.Conv2d]()
    optimizers = list[torch.optim.Optimizer]()
    saved = dict[str, object]()
    for number in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
        optimizers.append(make_optimizer(models[-1], train, sharded=False))
        if number:
            models[1].load_state_dict(models[0].state_dict())
            restore_optimizer(saved, models[1], optimizers[1])
            strides = {key: one.stride() for key, one in optimizers[1].state[models[1].weight].items() if one.ndim == 4}
            assert set(strides.values()) == {models[1].weight.stride()}
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(2 - number):
                torch.manual_seed(1 + number)
                for parameter in model.parameters():
                    parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
                optimizer.step()
        if not number:  # as a checkpoint has it: contiguous
            names = dict(models[0].named_parameters())
            state = {
                name: {key: one.contiguous().clone() for key, one in optimizers[0].state[parameter].items()}
                for name, parameter in names.items()
            }
            saved = {"state": state, "param_groups": optimizers[0].state_dict()["param_groups"]}
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
