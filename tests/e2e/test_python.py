"""The Python interface as a user's script has it: alone, with processes of its own, and under torchrun."""

import copy
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import manyhands
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.run.python import _as_arguments
from tests.e2e import nets
from tests.e2e.command import TORCHRUN, done, environment, events, fit, processes_of, start
from tests.e2e.nets import tiny

pytestmark = pytest.mark.timeout(300)

# As a file, or as a notebook runs its cells: without `if __name__ == "__main__"`, with a network and a data set of its
# own, a class that is written anew, functions, lambdas and a closure.
SCRIPT = """
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
    pass

class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))

    def forward(self, x):
        return self.layers(scaled(x))

def scaled(x):
    return x * FACTOR

FACTOR = 2.0

def note(end):
    with open("ends.txt", "a") as file:
        print(end.epoch, end.evaluation.count, file=file)

processes = int(os.environ["PROCESSES"]) if "PROCESSES" in os.environ else None
torch.manual_seed(0)
net = Counter()
data = Dots(200, shifted_by(-0.5))
run = manyhands.fit(net, data, Dots(60, shifted_by(-0.5)), epochs=3, batch=20, lr=0.1, processes=processes, out="run",
                    quiet=True, run__report=False, at_epoch_end=note,
                    loss=lambda output, labels: nn.functional.cross_entropy(output, labels, reduction="none"))
right = sum(int(net(x[None]).argmax()) == y for x, y in (data[i] for i in range(100)))
counted = run.final.count, manyhands.evaluate(run.model, data).count
sys.stdout.write(f"{run.status} {counted} {run.best.top1 > 0.9} {right > 90}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cells", "torchrun"])
def test_fit_from_a_script(how):
    """Every process of it has the run."""
    Path("own.py").write_text(SCRIPT)
    if how == "cells":
        line, variables = [sys.executable, "-"], environment(PROCESSES="2")
        out = subprocess.run(line, input=SCRIPT, stdout=subprocess.PIPE, text=True, check=True, env=variables).stdout
    else:
        out = done("own.py", program=TORCHRUN, by=start).out
    assert out.splitlines() == ["finished (60, 200) True True"] * (2 if how == "torchrun" else 1)
    assert Path("ends.txt").read_text().splitlines() == ["1 60", "2 60", "3 60"]
    assert processes_of("run") == 2


def fail(end):
    raise KeyError(f"the user's own mistake after epoch {end.epoch}")


@pytest.fixture
def importable(monkeypatch):
    """What is defined here is found by processes of its own."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("network", "options", "words", "frame"),
    [
        (nets.RaisesOnRank0, {}, "the user's own mistake", "in act"),
        (nets.Net, {"at_epoch_end": fail}, "the user's own mistake after epoch 1", "in fail"),
        pytest.param(nets.Raises, {"processes": 2}, "the user's own mistake", "in act", marks=pytest.mark.slow),
    ],
)
def test_fit_raises_the_first_cause(network, options, words, frame):
    with pytest.raises(RunError, match=words) as raised:
        fit(network(), tiny(400), epochs=9, batch=20, **options)
    if "processes" in options:
        assert raised.value.where.startswith("rank 1 on ")
        assert "nets.py:" in raised.value.where
    else:
        assert isinstance(raised.value.__cause__, KeyError)
    assert any(frame in note for note in raised.value.__notes__)


def test_out_of_memory_in_an_evaluation_says_what_fits():
    with pytest.raises(RunError, match="out of memory with 256 pictures in an evaluation batch") as raised:
        fit(nets.Hungry(), tiny(), tiny(300), batch=20)
    assert raised.value.hints[0] == "reduce the batch: evaluate_batch=128"


@pytest.mark.parametrize(
    ("hint", "in_python"),
    [
        ("train.lr: should be a number   [flag --train.lr]", "train.lr: should be a number   [argument lr=…]"),
        ("--parallel data --sync allreduce", 'parallel__mode="data" sync__method="allreduce"'),
        ("--set train.micro_batch=8: the batch stays 32", "micro_batch=8: the batch stays 32"),
        ("--set 'train.metrics=[\"file.py:x\"]'", 'metrics=["file.py:x"]'),
        ("--data.skip-corrupt leaves it out", "data__skip_corrupt=True leaves it out"),
        ("manyhands resume x --epochs 4", "manyhands resume x --epochs 4"),
    ],
)
def test_flags_in_hints_are_arguments_in_python(hint, in_python):
    assert _as_arguments(hint) == in_python


def test_messages_and_hints_name_arguments(monkeypatch):
    (folder := Path("held")).mkdir()
    (folder / "job.toml").touch()
    with pytest.raises(UserError) as raised, manyhands.session(out=folder, checkpoint__resume="never"):
        pass
    assert raised.value.where == "out"
    assert raised.value.hints == ('use checkpoint__resume="auto"', "or use a new out=…")
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"^processes=2 contradicts RANK, WORLD_SIZE") as raised:
        fit("mlp", "digits", processes=2)
    assert raised.value.hints[0] == "remove processes=2"
    assert not Path("run").exists()


# A float32 layer, and a float64 scale.
MIXED = """
import torch
from torch import nn

class Mixed(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * self.scale

net = Mixed(nn.Flatten(), nn.Linear(64, 10))
net.scale = nn.Parameter(torch.ones((), dtype=torch.double))
double = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
"""


def test_a_network_keeps_its_types_and_computes_in_them():
    exec(MIXED, made := {})
    network, (images, labels) = made["net"], tiny().tensors
    fit(network, tiny(), batch=20, out="several")
    with manyhands.session() as here:
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        model, optimizer, batches = here.prepare(network, optimizer, tiny(), batch=20)
        for x, y in batches:
            here.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    assert [one.dtype for one in network.parameters()] == [torch.float64, torch.float32, torch.float32]
    seen = set()

    class Seeing(nets.Net):
        def forward(self, x):
            seen.add(x.dtype)
            return super().forward(x)

    for number, settings in enumerate(({}, {"precision": "fp32"})):
        fit(Seeing().double(), TensorDataset(images.double(), labels), batch=20, out=str(number), **settings)
    assert seen == {torch.float64}
    Path("own.py").write_text(MIXED)
    with pytest.raises(UserError, match=r"the network is float64, but train.precision is fp32"):
        fit("own.py:double", tiny(), batch=20, precision="fp32", out="other")
    fit("own.py:net", tiny(), batch=20, precision="fp32", out="mixed")
    assert manyhands.predict("mixed", [images[0]])


def test_a_job_is_a_base_that_arguments_win_over(tmp_path):
    job = manyhands.Job(train={"epochs": 2, "batch": 20, "lr": 0.3}, run={"report": False})
    torch.manual_seed(0)
    net = nets.Net()
    run = manyhands.fit(copy.deepcopy(net), tiny(), job=job, lr=0.1, out="run", quiet=True)
    used = tomllib.loads((run.path / "job.toml").read_text())["train"]
    assert (used["epochs"], used["batch"], used["lr"]) == (2, 20, 0.1)
    again = manyhands.fit(copy.deepcopy(net), tiny(), job="run/job.toml", out=tmp_path / "again", quiet=True)
    assert tomllib.loads((again.path / "job.toml").read_text())["train"] == used
    assert again.evaluations[-1].loss == run.evaluations[-1].loss
    Path("names.toml").write_text('data = "synthetic:60x1x8x8x3"\nmodel = "mlp"\n[train]\nepochs = 1\n')
    assert fit(job="names.toml", out="names").final.count == 12


def test_a_job_goes_to_evaluate_session_and_find_plan():
    job = manyhands.Job(train={"evaluate_batch": 7, "seed": 5, "batch": 12}, cluster={"processes": 2})
    assert manyhands.evaluate(nets.Net(), tiny(33), job=job).count == 33
    with manyhands.session(job=job, norm_group=4) as here:
        assert (here.job.train.evaluate_batch, here.job.train.seed, here.job.train.norm_group) == (7, 5, 4)
    assert manyhands.find_plan(nets.Net(), torch.rand(1, 8, 8), job=job).mesh.size == 2


def fitted(**options):
    return fit(nets.Net(), tiny(), **options)


REFUSED = [
    (lambda: fitted(epoch=3), "fit has no argument epoch"),
    (lambda: fitted(workers=2), r"fit has no argument workers[\s\S]*processes=2"),
    (lambda: fitted(data__worker=3), "data.worker"),
    (lambda: fitted(epochs="x"), r"train.epochs: .*\n  where: argument epochs"),
    (lambda: fitted(parallel="fsdp"), r"fit has no argument parallel[\s\S]*did you mean parallel__mode\?"),
    (lambda: fitted(name="first"), r"no argument name[\s\S]*pass the network and the data to fit\(model, train_set\)"),
    (lambda: fitted(job={"train": {}}), "job is a dict, neither a Job"),
    (lambda: fitted(job="no.toml"), "there is no job file no.toml"),
    (lambda: fit(nets.Net(), None), "fit was called without a training set"),
    (lambda: fit("mlp", "digits", tiny()), "test_set needs a train_set that is a Dataset"),
    (lambda: fit(nets.OneNumber(), tiny()), r"forward returns a tensor \[\d+\]\n[\s\S]*\[N, classes\]"),
    (lambda: fitted(at_epoch_end=3), "at_epoch_end is not a function"),
    (lambda: fit(nets.Net(num_classes=4), tiny()), r"the shape \[2, 4\][\s\S]*\n.* or add model__num_classes=4"),
    (lambda: manyhands.evaluate(nets.Net(), tiny(), batch=0), "train.evaluate_batch"),
    (lambda: manyhands.session().prepare(None, None, None, batch=1), r"not open[\s\S]*open it: with manyhands.session"),
    (lambda: manyhands.session(schedule="cosine").__enter__(), "session has a schedule, but no number of epochs"),
    (lambda: fit(torch.nn.Linear, tiny()), "model is .*, not a network"),
    (lambda: manyhands.evaluate(lambda: nets.Net(), tiny()), "model is .*, not a network"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_a_mistake_is_refused(call, text):
    with pytest.raises(UserError) as raised:
        call()
    assert isinstance(raised.value, ManyhandsError)
    assert re.search(text, str(raised.value))
    assert not Path("run").exists()


def test_at_epoch_end_sees_each_epoch_and_changes_nothing():
    seen = []
    torch.manual_seed(0)
    net = nets.Net()
    options = {"epochs": 3, "batch": 20, "evaluate_every": 2}
    plain = fit(copy.deepcopy(net), tiny(), tiny(), out="plain", **options)
    fit(net, tiny(), tiny(), at_epoch_end=lambda end: seen.append((end, torch.rand(3))), **options)
    assert [(end.epoch, end.step) for end, _ in seen] == [(1, 2), (2, 4), (3, 6)]
    assert [end.evaluation and end.evaluation.step for end, _ in seen] == [None, 4, 6]
    assert [end.evaluation.loss for end, _ in seen[1:]] == [one.loss for one in plain.evaluations]
    assert {end.path for end, _ in seen} == {Path("run").absolute()}
    with pytest.raises(AttributeError):
        seen[0][0].epoch = 9


@pytest.mark.parametrize(
    ("number", "raised", "processes"),
    [
        (signal.SIGINT, KeyboardInterrupt, None),
        (signal.SIGTERM, SystemExit, None),
        pytest.param(signal.SIGTERM, SystemExit, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("importable")
def test_a_stop_saves_and_ends_the_script_too(number, raised, processes):
    def stop():
        while not Path("run/metrics.jsonl").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    net = nets.Net()
    with pytest.raises(raised) as ended:
        fit(net, tiny(), epochs=100_000, batch=20, processes=processes)
    assert raised is KeyboardInterrupt or ended.value.code == 75
    (stopped,), saved = events("run", "stopped"), events("run", "saved")[-1]
    assert stopped["step"] == saved["step"]
    weights = manyhands.load("run", "last", model=nets.Net()).network.state_dict()
    assert all(torch.equal(weights[name], one) for name, one in net.state_dict().items())


def test_evaluate_needs_no_run_and_leaves_float_samples_unchanged():
    net, (images, labels) = nets.Net(), (tiny(33).tensors)
    loss = torch.nn.functional.cross_entropy(net.eval()(images), labels).item()
    found = manyhands.evaluate(net, tiny(33))
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.count == found.confusion.sum() == 33
    assert manyhands.evaluate(net, TensorDataset(images, torch.zeros(33, dtype=torch.int64))).count == 33


def shades(count, dark, names=("dark", "bright")):
    """Pictures uint8 of two classes, dark and bright; so many of the dark ones."""
    bright = (torch.arange(count) >= dark).long()
    images = torch.randint(0, 60, (count, 1, 8, 8), generator=torch.Generator().manual_seed(3)) + 70
    labels = bright if names[0] == "dark" else 1 - bright
    data = TensorDataset((images + bright.view(-1, 1, 1, 1) * 40).to(torch.uint8), labels)
    data.classes = list(names)
    return data


# Its own mean would make dark pictures of half of the bright ones.
BRIGHT = shades(101, 1)


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_evaluation_normalizes_as_the_training_did_and_follows_the_names_of_classes(processes):
    def made():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))

    net, there, back = made(), shades(200, 100), shades(60, 30, ("bright", "dark"))
    run = fit(net, there, back, held_out_set=back, epochs=5, batch=20, lr=0.1, processes=processes)
    assert (run.final.top1, run.test.top1) == (1, 1)
    for each in (net, run, manyhands.load(run.path, model=made()).network):
        assert [manyhands.evaluate(each, data).top1 for data in (BRIGHT, back, shades(40, 40, ("dark",)))] == [1, 1, 1]
    assert manyhands.evaluate(net, TensorDataset(torch.zeros(3, 1, 8, 8), torch.arange(3) % 2)).count == 3
    with manyhands.session() as here:
        fresh = copy.deepcopy(net)
        model, _, _ = here.prepare(fresh, torch.optim.SGD(fresh.parameters(), 0.1), there, batch=20)
        found = [here.evaluate(each, data).top1 for each in (model, copy.deepcopy(net)) for data in (BRIGHT, back)]
    assert found == [1, 1, 1, 1]


def test_evaluation_of_pictures_whose_normalization_is_unknown_is_refused():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    with pytest.raises(UserError, match=r"pictures are unknown[\s\S]*evaluate\(run, test_set\)"):
        manyhands.evaluate(net, BRIGHT)
    assert manyhands.evaluate(net, BRIGHT, job=manyhands.Job(data={"mean": [0.4], "std": [0.1]})).count == 101
