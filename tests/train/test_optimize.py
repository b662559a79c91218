"""How long a job trains, and how much its optimizer keeps: figures that plans, sync methods and training share."""

import pytest
import torch

from manyhands.config.job import TrainOptions
from manyhands.train.optimize import make_optimizer, slots_of, steps_to_make, total_steps


@pytest.mark.parametrize(
    ("options", "total", "made"),
    [
        ({"epochs": 3}, 30, 30),
        ({"epochs": 3, "start_epoch": 1}, 30, 20),
        # max_steps counts from the first epoch, as the run's own end does.
        ({"epochs": 3, "start_epoch": 1, "max_steps": 15}, 15, 5),
        ({"epochs": 3, "max_steps": 99}, 30, 30),
        ({"epochs": 3, "start_epoch": 3}, 30, 1),
    ],
)
def test_updates_of_a_job(options, total, made):
    train = TrainOptions(batch=10, **options)
    assert total_steps(train, 10) == total
    assert steps_to_make(train, 98) == made


def test_a_batch_is_no_larger_than_the_data():
    assert steps_to_make(TrainOptions(batch=64, epochs=2), 10) == 2


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.0}, {"optimizer": "adamw"}])
def test_slots_are_what_the_optimizer_keeps(options):
    train = TrainOptions(**options)
    model = torch.nn.Linear(3, 2)
    state = make_optimizer(model, train, sharded=False).state[model.weight]
    assert slots_of(train) == sum(tensor.shape == model.weight.shape for tensor in state.values())
