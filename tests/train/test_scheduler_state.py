"""What a scheduler has counted, through JSON into one that was just made: it goes on as if it had never stopped."""

import copy
import json
import warnings

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from manyhands.core.errors import UserError
from manyhands.train.schedule import (
    CustomScheduler,
    as_plain_data,
    from_plain_data,
    reading_of,
    restore_scheduler,
    scheduler_state,
)

SCHEDULERS = [
    lambda o: lr_scheduler.StepLR(o, 2),
    lambda o: lr_scheduler.MultiStepLR(o, [2, 3]),
    lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=9),
    lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, step_size_up=2),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: lr_scheduler.PolynomialLR(o),
    lambda o: swa_utils.SWALR(o, swa_lr=0.1),
    lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [1, 2])], o),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [1, 2])], [2]),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
]


def sgd():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.5, momentum=0.9)


def rates(optimizer, scheduler, steps):
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        found.append({**optimizer.param_groups[0], "params": None})
    return found


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_it_goes_on_as_one_that_never_stopped(make, before):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Detected call|The epoch parameter")
        first = sgd()
        scheduler = make(first)
        rates(first, scheduler, before)
        state, group = json.loads(json.dumps(scheduler_state(scheduler))), copy.deepcopy(first.param_groups[0])
        second = sgd()
        again = make(second)
        second.param_groups[0].update({**group, "params": second.param_groups[0]["params"]})
        restore_scheduler(again, state)
        assert rates(second, again, 4) == rates(first, scheduler, 4)


def test_data_comes_back_as_it_was():
    value = {"a": [1, (2.5, None)], 3: {"dict": "x", (1, 2): True}, "best": float("inf"), "f": print}
    assert from_plain_data(json.loads(json.dumps(as_plain_data(value)))) == {k: v for k, v in value.items() if k != "f"}


JUNK = [None, "x", [], {}, [1], {"list": "x"}, {"list": ["x", None, {}]}, {"dict": [[{"list": []}, 1]]}, {"other": []}]


def spoilt(tree):
    """All trees like this one, but with something of another kind in one place."""
    yield from (2.5 if type(tree) is type(junk) is str else junk for junk in JUNK)
    for key, one in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        for other in spoilt(one):
            again = copy.copy(tree)
            again[key] = other
            yield again
    if isinstance(tree, dict):
        yield from ({**tree, name: "x"} for name in ("step", "optimizer", "lr_lambdas", "params", "foreach"))
        yield from ({key: one for key, one in tree.items() if key != left_out} for left_out in tree)


@pytest.mark.parametrize("make", SCHEDULERS)
def test_junk_of_any_kind_anywhere_is_refused_in_words_or_does_no_harm(make):
    optimizer = sgd()
    scheduler = CustomScheduler(make(optimizer), optimizer)
    for step in range(3):
        optimizer.step()
        scheduler(step)
        scheduler.evaluated(1.0)
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for saved in spoilt(json.loads(scheduler.saved())):
            optimizer = sgd()
            again = CustomScheduler(make(optimizer), optimizer)
            try:
                with reading_of("runs/a/checkpoints/step-3"):
                    again.resume(json.dumps(saved), 3)
            except UserError as error:
                refused += error.where == "runs/a/checkpoints/step-3"
                continue
            for step in range(3, 6):
                optimizer.step()
                again(step)
                again.evaluated(1.0)
                assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert refused
