"""A schedule of the user's own: true rates, exact resume, recorded with its file's digest; refused where it must be."""

import collections
import copy
import dataclasses
import functools
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import manyhands
from manyhands.checkpoint.read import load
from manyhands.checkpoint.write import save
from manyhands.config.job import TrainOptions
from manyhands.core.errors import UserError
from manyhands.train.optimize import make_schedule
from tests.e2e.command import run

pytestmark = pytest.mark.timeout(300)
IMAGES = torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(IMAGES, torch.arange(24) % 10)
# A batch is all of the data, so that its order doesn't matter: six updates.
OPTIONS = {"batch": 24, "epochs": 6, "quiet": True, "run__report": False, "run__log_every_s": 1e-3,
           "precision": "fp64"}  # fmt: skip


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def own_sgd(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": others}, {"params": [first], "lr": 0.2}], lr=0.1, momentum=0.9)


def by_name(step, total_steps, steps_per_epoch=0):
    assert steps_per_epoch == 1
    return 1 - step / total_steps


class ByTheWeights(lr_scheduler.LRScheduler):
    """Rates that depend on more than the step: on all that the network has been so far."""

    def __init__(self, optimizer):
        self.sizes = []
        super().__init__(optimizer)

    def get_lr(self):
        self.sizes.append(float(self.optimizer.param_groups[0]["params"][0].detach().abs().mean()))
        return [rate / (1 + 10 * sum(self.sizes)) for rate in self.base_lrs]


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.05)


# Each with the plain loop's scheduler.
SCHEDULES = {
    "step": (lambda step: 0.5**step, lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step)),
    "total": (by_name, lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / 6)),
    "cosine": (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),) * 2,
    "one cycle, which moves momentum too": (
        functools.partial(lr_scheduler.OneCycleLR, max_lr=0.3),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=6),
    ),
    "more than the step": (ByTheWeights,) * 2,
    "of others": (
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [1, 2])], [2]
        ),
    )
    * 2,
    "by the loss": (plateau,) * 2,
}


def rates(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["learning_rate"] for line in lines if line["kind"] == "step"}


@pytest.mark.parametrize(("ours", "torchs"), SCHEDULES.values(), ids=SCHEDULES.keys())
def test_it_makes_the_updates_of_a_plain_loop_shows_its_rates_and_goes_on_exactly(ours, torchs, tmp_path):
    plain, whole, parted = (copy.deepcopy(network()).double() for _ in range(3))
    optimizer = own_sgd(list(plain.parameters()))
    scheduler, wanted = torchs(optimizer), {}
    for step in range(6):
        wanted[step + 1] = max(group["lr"] for group in optimizer.param_groups)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(IMAGES.double()), DATA.tensors[1]).backward()
        optimizer.step()
        if scheduler.__class__ is lr_scheduler.ReduceLROnPlateau:
            scheduler.step(nn.functional.cross_entropy(plain(IMAGES.double()), DATA.tensors[1]).item())
        else:
            scheduler.step()
    own = {"optimizer": own_sgd, "schedule": ours}
    told = manyhands.fit(whole, DATA, DATA, out=tmp_path / "whole", **own, **OPTIONS)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(whole.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
    shown = rates(told.path)
    assert shown == pytest.approx({step: wanted[step] for step in shown})
    assert {1, 6} <= shown.keys()
    for steps in (3, 0):
        manyhands.fit(parted, DATA, DATA, out=tmp_path / "parted", checkpoint__resume="auto", max_steps=steps,
                      **own, **OPTIONS)  # fmt: skip
    assert "is reset" not in (tmp_path / "parted" / "events.jsonl").read_text()
    assert all(torch.equal(parted.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
    assert rates(tmp_path / "parted") == {step: pytest.approx(wanted[step], rel=1e-12) for step in range(1, 7)}


def test_an_evaluation_where_a_run_was_cut_within_an_epoch_moves_no_rate(tmp_path):
    def impatient(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=1.0)

    options = {**OPTIONS, "batch": 8, "optimizer": own_sgd, "schedule": impatient}
    whole = manyhands.fit(network(), DATA, DATA, out=tmp_path / "whole", **options)
    for steps in (4, 8, 0):
        manyhands.fit(network(), DATA, DATA, out=tmp_path / "parted", checkpoint__resume="auto", max_steps=steps,
                      **options)  # fmt: skip
    wanted, shown = rates(whole.path), rates(tmp_path / "parted")
    common = wanted.keys() & shown.keys()
    assert {1, 6, 9, 12, 15, 18} <= common  # ends of epochs are always there
    assert {step: shown[step] for step in common} == {step: wanted[step] for step in common}
    assert wanted[18] < wanted[1]


def cosine(optimizer, total_steps):
    return lr_scheduler.CosineAnnealingLR(optimizer, total_steps)


@pytest.mark.parametrize("of", [by_name, cosine])
def test_a_longer_run_has_the_rates_of_its_new_length(of, tmp_path):
    for epochs in (3, 6):
        again = {**OPTIONS, "out": tmp_path / "run", "checkpoint__resume": "auto", "epochs": epochs}
        manyhands.fit(network(), DATA, DATA, optimizer=own_sgd, schedule=of, **again)
    whole = manyhands.fit(network(), DATA, DATA, optimizer=own_sgd, schedule=of, out=tmp_path / "whole", **OPTIONS)
    wanted, shown = rates(whole.path), rates(tmp_path / "run")
    assert [shown[step] for step in (4, 5, 6)] == pytest.approx([wanted[step] for step in (4, 5, 6)])


def test_another_schedule_may_take_over_and_the_optimizer_keeps_its_state(tmp_path):
    again = {**OPTIONS, "optimizer": own_sgd, "out": tmp_path / "run", "checkpoint__resume": "auto"}
    manyhands.fit(network(), DATA, DATA, schedule=SCHEDULES["one cycle, which moves momentum too"][0], max_steps=3,
                  **again)  # fmt: skip
    manyhands.fit(network(), DATA, DATA, schedule="constant", **again)
    assert "is reset" not in (tmp_path / "run" / "events.jsonl").read_text()
    assert rates(tmp_path / "run")[6] == 0.2


def session(out):
    here = network()
    with manyhands.session(out=out) as s:
        sgd = torch.optim.SGD(here.parameters(), 0.1)
        model, optimizer, batches = s.prepare(here, sgd, DATA, batch=24, scheduler=lr_scheduler.StepLR(sgd, 1))
        for _epoch in s.epochs(1):
            for x, y in batches:
                s.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()


def fitted(out):
    options = {**OPTIONS, "epochs": 1, "checkpoint__resume": "auto"}
    manyhands.fit(network(), DATA, DATA, optimizer=own_sgd, schedule=plateau, out=out, **options)


OTHER_TEXTS = ["x", "null", "3", "[]", '{"last_epoch": "x"}', '{"dict": []}']


@pytest.mark.parametrize(
    ("train", "changes"),
    [
        (fitted, [{"schedule": text} for text in OTHER_TEXTS]),
        pytest.param(session, [{"session": {"scheduler": text}} for text in OTHER_TEXTS], marks=pytest.mark.slow),
    ],
)
def test_a_scheduler_s_state_that_nobody_saved_is_refused_with_its_checkpoint(train, changes, tmp_path):
    train(tmp_path)
    (path,) = (tmp_path / "checkpoints").glob("step-*")
    good = load(path)
    for change in changes:
        shutil.rmtree(path)
        save(path.parent, 1, dataclasses.replace(good, state={**good.state, **change}))
        with pytest.raises(UserError, match="the scheduler's state in the checkpoint can't be restored") as caught:
            train(tmp_path)
        assert caught.value.where == str(path)


OWN = """
import torch


def half(step, total_steps):
    return 1.0 if 2 * step < total_steps else 0.1


def make(optimizer, steps_per_epoch):
    return torch.optim.lr_scheduler.StepLR(optimizer, steps_per_epoch)


RATE = 0.1
"""
JOB = """
data = "synthetic:60x1x8x8x3"
model = "mlp"
[train]
schedule = "own.py:make"
"""
SMALL = ["train", "job.toml", "--epochs", 2, "--batch", 20, "--set", "run.report=false",
         "--set", "train.lr=0.04", "--set", "run.log_every_s=0.001"]  # fmt: skip


@pytest.mark.slow
def test_a_job_names_a_file_of_the_users_for_several_processes():
    Path("own.py").write_text(OWN)
    Path("job.toml").write_text(JOB)
    losses = {}
    for name, processes, mode in (("one", 1, "single"), ("two", 2, "fsdp")):
        ended = run(*SMALL, "--out", name, "-n", processes, "--parallel", mode)
        assert ended.code == 0, ended.err
        losses[name] = manyhands.Run(Path(name), "finished").final.loss
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)
    shown = rates(Path("two"))
    assert (shown[1], shown[6]) == (0.04, pytest.approx(0.004))
    assert "own.py:make" in json.loads(Path("two/network.json").read_text())["code"]
    more = run("resume", "two", "-n", 1, "--epochs", 3)
    assert more.code == 0, more.err
    assert rates(Path("two"))[9] == pytest.approx(0.0004)
    assert "own.py, as" in more.err
    assert "CHANGED" not in more.err
    Path("own.py").write_text(OWN.replace("0.1", "0.2"))
    assert "CHANGED since training" in run("resume", "two", "-n", 1, "--epochs", 4).err


@pytest.mark.slow
def test_a_run_whose_schedule_was_an_object_does_not_go_on_with_another():
    told = manyhands.fit(
        "mlp", "synthetic:60x1x8x8x3", schedule=lambda step: 0.5, out="run", **{**OPTIONS, "epochs": 1}
    )
    refused = run("resume", told.path, "--epochs", 2)
    assert refused.code == 2
    assert "this run's schedule was a Python object" in refused.err
    Path("own.py").write_text(OWN)
    assert run("resume", told.path, "--epochs", 2, "--set", "train.schedule=own.py:half").code == 0


class Keeps(lr_scheduler.ConstantLR):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.seen = collections.deque([1])


def other():
    return torch.optim.SGD([torch.zeros(1)], 1.0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"schedule": 0.5}, "the schedule is a float, not a function"),
        ({"schedule": lr_scheduler.StepLR(own_sgd(network().parameters()), 3)}, "the schedule is a StepLR, not a"),
        ({"schedule": "own.py:RATE"}, "the schedule is a float, not a function"),
        ({"schedule": "own.py:missing"}, "own.py has no object missing"),
        ({"schedule": "cosin"}, 'did you mean "cosine"'),
        ({"schedule": "object"}, "was a Python object"),
        ({"schedule": lambda step, epochs: 1.0}, "the schedule function has an unknown parameter: epochs"),
        ({"schedule": lambda: 1.0}, "the schedule takes no argument"),
        ({"schedule": lambda step: "high"}, "the schedule returned a str at step 0"),
        ({"schedule": lambda step: None}, "the schedule returned a NoneType at step 0"),
        ({"schedule": lambda step: -0.1}, "the schedule returned -0.1 at step 0"),
        ({"schedule": lambda step: float("nan") if step == 2 else 1.0}, "the schedule returned nan at step 2"),
        ({"schedule": lambda o: lr_scheduler.StepLR(o, 3)}, "the schedule failed at step 0: TypeError"),
        ({"schedule": lr_scheduler.ReduceLROnPlateau, "evaluate_every": 0}, "the schedule needs evaluations"),
        (
            {"schedule": functools.partial(lr_scheduler.ReduceLROnPlateau, mode="max")},
            "monitors the loss, but has mode=",
        ),
        ({"schedule": Keeps}, "the attribute seen of the scheduler Keeps is a deque, which can't be saved"),
        ({"schedule": lr_scheduler.StepLR}, "the schedule function has an unknown parameter: step_size"),
        ({"schedule": lambda optimizer: lr_scheduler.StepLR(optimizer)}, "the schedule failed with this optimizer: T"),
        (
            {"schedule": lambda optimizer: lr_scheduler.StepLR(other(), 3)},
            "the schedule's StepLR belongs to another optimizer",
        ),
        ({"schedule": max}, "the schedule failed at step 0: TypeError"),
        ({"schedule": lambda optimizer: 3}, "the schedule function returned a int"),
        ({"schedule": lambda step: 1.0, "warmup_epochs": 1.0}, "a schedule of your own includes its own warm-up"),
    ],
)
def test_what_is_no_schedule_is_refused(settings, text, tmp_path):
    Path("own.py").write_text(OWN)
    with pytest.raises(UserError, match=text):
        manyhands.fit(network(), DATA, DATA, out=tmp_path / "run", **OPTIONS, **settings)


def test_what_python_warns_of_once_is_not_said_at_every_update():
    optimizer = own_sgd(network().parameters())
    set_rates = make_schedule(optimizer, TrainOptions(), 5, lambda optimizer: lr_scheduler.StepLR(optimizer, 2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for step in range(20):
            set_rates(step)
            optimizer.step()
            warnings.warn("the user's own", stacklevel=1)
    assert 1 <= len(told) <= 3
    assert {str(one.message) for one in told} == {"the user's own"}


def test_a_recipe_s_warm_up_gives_way(tmp_path):
    Path("own.py").write_text(OWN)
    ended = run("train", "folder:x", "--show-config", "--set", "train.schedule=own.py:half")
    assert "warmup_epochs = 0.0" in ended.out, ended.err
