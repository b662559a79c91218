"""An optimizer of the user's own: exact, saved, resumed, recorded with its file's digest; refused where it must be."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands
from manyhands.core.errors import ManyhandsError, UserError
from tests.e2e.command import run

pytestmark = pytest.mark.timeout(300)
IMAGES = torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(IMAGES, torch.arange(24) % 10)
# A batch is all of the data, so that its order doesn't matter.
OPTIONS = {"batch": 24, "epochs": 6, "quiet": True, "run__report": False, "precision": "fp64", "schedule": "constant"}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def two_rates(parameters):
    first, *others = parameters
    return torch.optim.RMSprop([{"params": others}, {"params": [first], "lr": 0.004}], lr=0.001, momentum=0.5)


MAKERS = {
    "class": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.003, amsgrad=True),
    "two rates": two_rates,
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_it_makes_the_updates_of_a_plain_loop_and_goes_on_exactly(make, tmp_path):
    plain, ours, parted = (copy.deepcopy(network()).double() for _ in range(3))
    optimizer = make(list(plain.parameters()))
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(IMAGES.double()), DATA.tensors[1]).backward()
        optimizer.step()
    run = manyhands.fit(ours, DATA, DATA, optimizer=make, out=tmp_path / "whole", **OPTIONS)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
    rates = [group["lr"] for group in make(list(plain.parameters())).param_groups]
    steps = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert {step["learning_rate"] for step in steps if step["kind"] == "step"} == {max(rates)}
    for epochs in (3, 6):
        manyhands.fit(parted, DATA, DATA, optimizer=make, out=tmp_path / "parted", checkpoint__resume="auto",
                      **{**OPTIONS, "epochs": epochs})  # fmt: skip
    assert all(torch.equal(parted.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())


class Times(nn.Module):
    """Of outputs so large that the loss scaler leaves the first update out."""

    def forward(self, x):
        return 60 * x


def fused(parameters):
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True)


def test_a_first_update_that_is_skipped_leaves_no_uninitialized_momentum(tmp_path):
    # Deterministic algorithms fill uninitialized memory with NaN.
    options = {"precision": "fp16", "deterministic": True}
    scaled = nn.Sequential(*network(), Times())
    run = manyhands.fit(scaled, DATA, DATA, optimizer=fused, out=tmp_path / "run", **{**OPTIONS, **options})
    assert run.final.loss < 100
    with manyhands.session(**options) as here:
        given = nn.Sequential(*network(), Times())
        model, optimizer, batches = here.prepare(given, fused(given.parameters()), DATA, batch=24)
        for _ in here.epochs(6):
            for x, y in batches:
                optimizer.zero_grad()
                here.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
    assert all(torch.equal(one, scaled.state_dict()[name]) for name, one in given.state_dict().items())


class Dropped(nn.Module):
    """LayerDrop: the second layer takes part from the second training pass on."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.passes = nn.Linear(64, 10), nn.Linear(64, 10), 0

    def forward(self, x):
        self.passes += self.training
        return self.first(x.flatten(1)) + (self.second(x.flatten(1)) if self.passes > 3 else 0)


def test_a_layer_that_takes_part_later_has_its_momentum(tmp_path):
    options = {**OPTIONS, "precision": "fp32"}
    assert manyhands.fit(Dropped(), DATA, DATA, optimizer=fused, out=tmp_path / "run", **options).final.loss < 100
    dampened = lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, dampening=0.5, fused=True)  # noqa: E731
    with pytest.raises(UserError, match="fused SGD with dampening"):
        manyhands.fit(network(), DATA, DATA, optimizer=dampened, out=tmp_path / "other", **options)


def test_a_loss_may_be_named_as_a_job_names_it(tmp_path):
    Path("own.py").write_text("def loss(output, labels):\n    return output.exp().sum(1)\n")
    run = manyhands.fit(network(), DATA, DATA, loss="own.py:loss", out=tmp_path / "run", **{**OPTIONS, "epochs": 1})
    assert "own.py:loss" in json.loads((run.path / "network.json").read_text())["code"]
    with pytest.raises(UserError, match='no loss is called "nil"'):
        manyhands.fit(network(), DATA, DATA, loss="nil", out=tmp_path / "nil", **OPTIONS)


@pytest.mark.slow
def test_a_run_whose_loss_was_an_object_does_not_go_on_with_another():
    run_of_names = manyhands.fit(
        "mlp",
        "synthetic:60x1x8x8x3",
        loss=lambda output, labels: output[:, 0] ** 2,
        out="run",
        **{**OPTIONS, "epochs": 1},
    )
    refused = run("resume", run_of_names.path, "--epochs", 2)
    assert refused.code == 2
    assert "this run's loss was a Python object" in refused.err


def test_another_optimizer_s_state_starts_anew_and_that_is_said(tmp_path):
    manyhands.fit(network(), DATA, DATA, out=tmp_path / "run", **{**OPTIONS, "epochs": 1})
    again = {**OPTIONS, "epochs": 2, "out": tmp_path / "run", "checkpoint__resume": "auto"}
    manyhands.fit(network(), DATA, DATA, optimizer=two_rates, **again)
    assert "the state of RMSprop is reset" in (tmp_path / "run" / "events.jsonl").read_text()


OPT = """
import torch


def make(parameters):
    return torch.optim.RMSprop(parameters, lr=0.002, momentum=0.9)


def nothing(parameters):
    return parameters


RATE = 0.1
"""
SMALL = ["train", "synthetic:60x1x8x8x3", "mlp", "--epochs", 2, "--batch", 20, "--set", "run.report=false"]


@pytest.mark.slow
def test_a_file_of_the_users_trains_several_processes_and_goes_on_at_another_number():
    Path("opt.py").write_text(OPT)
    losses = {}
    for name, processes in (("one", 1), ("two", 2)):
        ended = run(*SMALL, "--out", name, "-n", processes, "--set", "train.optimizer=opt.py:make")
        assert ended.code == 0, ended.err
        losses[name] = manyhands.Run(Path(name), "finished").final.loss
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)
    assert "opt.py:make" in json.loads(Path("two/network.json").read_text())["code"]
    more = run("resume", "two", "-n", 1, "--epochs", 3)
    assert more.code == 0, more.err
    assert "CHANGED" not in more.err
    assert "opt.py" in more.err
    assert "is reset" not in Path("two/events.jsonl").read_text()
    Path("opt.py").write_text(OPT.replace("0.002", "0.003"))
    assert "opt.py, as two" in run("resume", "two", "-n", 1, "--epochs", 4).err


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"optimizer": lambda parameters: 3}, "returned a int"),
        ({"optimizer": torch.optim.SGD(network().parameters(), 0.1)}, "the optimizer is a SGD, not a function"),
        ({"optimizer": "opt.py:RATE"}, "opt.py:RATE is a float, not a function"),
        (
            {"optimizer": torch.optim.RMSprop, "job": manyhands.Job(train=manyhands.TrainOptions(lr=0.3))},
            "train.lr applies to sgd and adamw",
        ),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS needs a closure"),
        ({"optimizer": lambda _: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])}, "isn't a trainable parameter"),
        ({"optimizer": lambda own: torch.optim.SGD(own[-1:], 0.1)}, "doesn't have the trainable parameter .*"),
        ({"optimizer": lambda own: torch.optim.SGD(own, lr=0.0)}, "no usable learning rate"),
        ({"optimizer": torch.optim.RMSprop, "lr": 0.1}, "train.lr applies to sgd and adamw"),
        ({"optimizer": "sdg"}, 'did you mean "sgd"'),
        ({"optimizer": "opt.py:missing"}, "opt.py has no object missing"),
        ({"optimizer": "object"}, "was a Python object"),
    ],
)
def test_what_is_no_optimizer_is_refused(settings, text, tmp_path):
    Path("opt.py").write_text(OPT)
    with pytest.raises(ManyhandsError, match=text) as raised:
        manyhands.fit(network(), DATA, DATA, out=tmp_path / "run", **{**OPTIONS, "precision": "fp32", **settings})
    assert isinstance(raised.value, UserError)
