"""What a scheduler has counted, through JSON into one that was just made: it goes on as if it had never stopped."""

import json
import warnings

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from manyhands.core.errors import UserError
from manyhands.train.optimize import CustomScheduler, as_plain_data, from_plain_data, scheduler_errors

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


def test_data_comes_back_as_it_was():
    value = {"a": [1, (2.5, None)], 3: {"dict": "x", (1, 2): True}, "best": float("inf"), "f": print}
    assert from_plain_data(json.loads(json.dumps(as_plain_data(value)))) == {k: v for k, v in value.items() if k != "f"}


class OfItsOwn(lr_scheduler.LRScheduler):
    """Rates that depend on more than the step, so that its state is saved."""

    def __init__(self, optimizer):
        self.seen = []
        super().__init__(optimizer)

    def get_lr(self):
        self.seen.append(self.last_epoch)
        return [rate / (1 + len(self.seen)) for rate in self.base_lrs]


def stepped(make, steps):
    optimizer = sgd()
    scheduler = CustomScheduler(make(optimizer), optimizer)
    for step in range(steps):
        optimizer.step()
        scheduler(step)
        scheduler.step_with_loss(1.0)
    return scheduler, optimizer


@pytest.mark.parametrize("make", [*SCHEDULERS, OfItsOwn])
@pytest.mark.filterwarnings("ignore:Detected call", "ignore:The epoch parameter")
def test_rates_go_on_from_the_step_alone_or_from_what_was_saved(make):
    """tests/e2e/test_own_objects.py resumes whole runs."""
    whole, (scheduler, _) = stepped(make, 5)[1], stepped(make, 4)
    saved, optimizer = scheduler.state_text(), sgd()
    again = CustomScheduler(make(optimizer), optimizer)
    assert bool(saved) == (make in (OfItsOwn, SCHEDULERS[-1]))
    if saved:
        again.resume(saved, 4)
    optimizer.step()
    again(4)
    again.step_with_loss(1.0)
    assert {**optimizer.param_groups[0], "params": None} == {**whole.param_groups[0], "params": None}


@pytest.mark.parametrize("make", [OfItsOwn, SCHEDULERS[-1]])
def test_other_data_is_refused_in_words(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        good = json.loads(stepped(make, 3)[0].state_text())
        junk = [None, "x", [], {}, [1], *({key: one for key, one in good.items() if key != left} for left in good)]
        spoilt = {"state": {**good["now"]["state"], "last_epoch": "x"}, "groups": good["now"]["groups"]}
        for saved in [*junk, {**good, "now": spoilt}, {**good, "now": {"state": {"a": []}, "groups": []}}]:
            optimizer = sgd()
            again = CustomScheduler(make(optimizer), optimizer)
            with pytest.raises(UserError) as caught, scheduler_errors("runs/a/checkpoints/step-3"):
                again.resume(json.dumps(saved), 3)
            assert caught.value.where == "runs/a/checkpoints/step-3"
