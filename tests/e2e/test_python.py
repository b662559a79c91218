"""The Python interface as a user's script has it: alone, with workers, and under torchrun."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import manyhands
from manyhands.core.errors import ManyhandsError, RunError, UserError
from tests.e2e import nets
from tests.e2e.command import run

pytestmark = pytest.mark.timeout(300)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# Without `if __name__ == "__main__"`, with a network and a data set of its own, a lambda and a closure in it.
SCRIPT = """
import json
import os
import sys

import torch
from torch import nn

import manyhands


def shifted_by(amount):
    return lambda x: x + amount


class Dots(torch.utils.data.Dataset):
    classes = ("few", "many")

    def __init__(self, count, transform):
        self.count, self.transform = count, transform

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(index))
        label = index % 2
        return self.transform((noise > (0.8, 0.3)[label]).float()), label


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))

    def forward(self, x):
        return self.layers(x)


workers = int(sys.argv[1]) if len(sys.argv) > 1 else None
torch.manual_seed(0)
net = Counter()
before = net.layers[1].weight.detach().clone()
data = Dots(200, shifted_by(-0.5))
run = manyhands.fit(net, data, Dots(60, shifted_by(-0.5)), epochs=3, batch=20, lr=0.1, workers=workers, out="run",
                    quiet=True, run__report=False)
right = sum(int(net(x[None]).argmax()) == y for x, y in (data[i] for i in range(100)))
if int(os.environ.get("RANK", "0")) == 0:
    print(json.dumps({"best": run.best.top1, "count": run.final.count, "status": run.status,
                      "changed": not torch.equal(before, net.layers[1].weight), "right": right}))
"""


@pytest.mark.parametrize("how", ["alone", "workers", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_fit_from_a_script(how):
    Path("own.py").write_text(SCRIPT)
    arguments = ["own.py", *(["2"] if how == "workers" else [])]
    ended = run(*arguments, program=TORCHRUN if how == "torchrun" else ())
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told == {**told, "count": 60, "status": "finished", "changed": True}
    assert told["best"] > 0.9
    assert told["right"] > 90
    processes = json.loads(Path("run/env.json").read_text())["processes"]
    assert processes == (1 if how == "alone" else 2)


def tiny(count=40):
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(images, torch.arange(count) % 10)


QUIET = {"quiet": True, "run__report": False, "out": "run"}


def test_fit_raises_the_first_cause():
    with pytest.raises(RunError, match="the user's own mistake") as raised:
        manyhands.fit(nets.RaisesOnRank0(), tiny(400), epochs=9, batch=20, **QUIET)
    assert isinstance(raised.value.__cause__, KeyError)


def test_out_of_memory_in_an_evaluation_says_what_fits():
    with pytest.raises(RunError, match="out of memory at 256 pictures in one pass of the evaluation") as raised:
        manyhands.fit(nets.Hungry(), tiny(), tiny(300), epochs=1, batch=20, **QUIET)
    assert raised.value.mend[0] == "--set train.evaluate_batch=128"


@pytest.mark.slow
def test_fit_with_workers_raises_the_first_cause(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    with pytest.raises(RunError, match="the user's own mistake") as raised:
        manyhands.fit(nets.Raises(), tiny(400), epochs=9, batch=20, workers=2, **QUIET)
    assert raised.value.where.startswith("rank 1 on ")
    assert any("in act" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"epoch": 3}, "fit has no argument epoch"),
        ({"batch": 0}, "train.batch"),
        ({"data__worker": 3}, "data.worker"),
    ],
)
def test_fit_refuses_a_mistake(settings, text):
    with pytest.raises(UserError, match=text) as raised:
        manyhands.fit(nets.Net(), tiny(), **{**QUIET, **settings})
    assert isinstance(raised.value, ManyhandsError)
    assert not Path("run").exists()


def test_a_network_with_too_few_outputs():
    with pytest.raises(UserError, match=r"the network's output is \[2, 3\] for 2 pictures of 10 classes"):
        manyhands.fit(nets.Net(num_classes=3), tiny(), **QUIET)


def test_evaluate_needs_no_run():
    found = manyhands.evaluate(nets.Net(), tiny(33))
    assert found.count == 33
    assert found.confusion.sum() == 33


LOOP = """
import json
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import manyhands

torch.manual_seed(2)
images = torch.randn(41, 5, dtype=torch.float64)
data = TensorDataset(images, (images[:, 0] > 0).long())
net = nn.Linear(5, 2).double()
with manyhands.session() as s:
    model, optimizer, batches = s.prepare(net, torch.optim.SGD(net.parameters(), 0.2), data, batch=8)
    for epoch in s.epochs(3):
        for x, y in batches:
            s.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    found = s.evaluate(model, data)
    total = s.all_reduce(torch.tensor([1.0]))
    if s.speaks:
        print(json.dumps({"size": s.size, "total": total.item(), "loss": found.loss,
                          "weights": net.weight.flatten().tolist()}))
"""


def test_an_own_loop_alone_and_under_torchrun():
    Path("loop.py").write_text(LOOP)
    ended = [run("loop.py", program=program) for program in ((), TORCHRUN)]
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    one, two = (json.loads(each.out) for each in ended)
    assert (one["size"], two["size"], two["total"]) == (1, 2, 2.0)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-9)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-9)
