"""The user's own loop: a plain loop's updates at any number of processes, resumed to the bit, whatever it trains."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import manyhands
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.report.read import read_run
from manyhands.train.session import Session
from manyhands.worker.run_metadata import write_metadata
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import by_case

# 53 samples in batches of 16 are 4 updates an epoch.
COUNT, BATCH = 53, 16


@contextlib.contextmanager
def opened(world, folder=None, **settings):
    """A session under the options of a job."""
    flags = {"data.name": "objects", "train.norm_group": 4, **settings}
    kept = folder and RunFolder(Path(folder))
    if kept:
        kept.failures.mkdir(parents=True, exist_ok=True)
    how = {"scheduled": "train.schedule" in settings, "write_metadata": write_metadata}
    here = Session(world, load_job(flags, environment={}).job, kept, **how)
    with contextlib.closing(here):
        yield here


def pictures(*, double=True):
    images = torch.randn(COUNT, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = (images.sum((1, 2, 3)) > 0).long() + (images[:, 0, 0, 0] > 1).long()
    return TensorDataset(images if double else images.float(), labels)


def convolution(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 3)
    )


def weights_of(net):
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def layers(*lengths):
    """Linear layers, with others in between so that they are called 0, 2, 4, …"""
    torch.manual_seed(1)
    made = [each for pair in itertools.pairwise(lengths) for each in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*made[:-1]).double()


def values():
    return torch.randn(COUNT, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Curve(Dataset):
    """Gives y as a number of Python's or numpy's, or as an array."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        x = values()[index]
        return x, self.kind(float(x.sum()))


CLASS_WEIGHTS = torch.tensor([5.0, 0.1, 1.0], dtype=torch.float64)


@dataclass
class Objects:
    """What a user trains: a data set, a network, the mean loss of (output, y), and what its samples count for."""

    data: Callable[[], Dataset]
    network: Callable[[], nn.Module]
    loss: Callable = lambda output, y: F.mse_loss(output.view_as(y), y.double())
    weigh: Callable | None = None


def _columns(count):
    return TensorDataset(values(), values()[:, :count].cumsum(1).sin())


OBJECTS = {
    "one column": Objects(lambda: _columns(1), lambda: layers(5, 7, 1)),
    "three columns": Objects(lambda: _columns(3), lambda: layers(5, 7, 3)),
    "numbers": Objects(lambda: Curve(float), lambda: layers(5, 7, 1)),
    "arrays": Objects(lambda: Curve(lambda value: numpy.array([value, -value])), lambda: layers(5, 7, 2)),
    "several classes at once": Objects(
        lambda: TensorDataset(values(), (values()[:, :3] > 0).long()), lambda: layers(5, 7, 3)
    ),
    "classes": Objects(
        lambda: TensorDataset(pictures()[:][0].flatten(1), pictures()[:][1]),
        lambda: layers(36, 12, 3), F.cross_entropy,
    ),
    "weighted": Objects(
        lambda: TensorDataset(pictures()[:][0].flatten(1), pictures()[:][1]), lambda: layers(36, 3),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), lambda y: CLASS_WEIGHTS[y].sum(),
    ),
    # The loop flattens what the network itself couldn't take.
    "shaped": Objects(pictures, lambda: layers(36, 3), F.cross_entropy),
    "BatchNorm": Objects(pictures, lambda: convolution().double(), F.cross_entropy),
}  # fmt: skip


def _trained(world, name, settings, plan=None):
    """Weights, each epoch's mean loss, an evaluation (loss, count and top1, if y are classes), and all batches."""
    objects, seen, losses = OBJECTS[name], [], []
    data, net = objects.data(), objects.network()
    with opened(world, **settings) as here:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        model, optimizer, batches = here.prepare(net, optimizer, data, batch=BATCH, plan=plan)
        for _ in here.epochs(3):
            model.train()
            for x, y in batches:
                optimizer.zero_grad()
                x = x.flatten(1) if name == "shaped" else x
                here.backward(objects.loss(model(x), y), *([objects.weigh(y)] if objects.weigh else []))
                optimizer.step()
                seen.append((x, y))
            losses.append(here.mean_loss())
        evaluated = ()
        if name in {"classes", "weighted", "BatchNorm"}:
            found = here.evaluate(model, data)
            evaluated = found.loss, found.count, found.top1
            with pytest.raises(UserError, match="label") if world.alone else contextlib.nullcontext():
                here.evaluate(model, data, classes=1 if world.alone else 0)
        elif world.alone and name != "shaped":
            with pytest.raises(UserError, match="y is not a whole number"):
                here.evaluate(model, data)
        return here.full_state_dict(), losses, evaluated, seen


@pytest.fixture(scope="module")
def alone():
    return {name: _trained(World(), name, {}) for name in OBJECTS}


def assert_close(found, wanted, tolerance=1e-9):
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance / 1000)


@pytest.mark.parametrize("name", [name for name in OBJECTS if name != "BatchNorm"])
def test_one_process_makes_the_plain_loops_updates_of_the_ys_of_its_xs(alone, name):
    weights, losses, _, seen = alone[name]
    objects = OBJECTS[name]
    net, sums = objects.network(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for x, y in seen:
        optimizer.zero_grad()
        loss = objects.loss(net(x), y)
        loss.backward()
        optimizer.step()
        count = float(objects.weigh(y)) if objects.weigh else len(x)
        sums.append((loss.item() * count, count))
    assert_close(weights, net.state_dict())
    assert losses[-1] < losses[0]
    epochs = [list(zip(*sums[first : first + 4], strict=True)) for first in (0, 4, 8)]
    assert losses == pytest.approx([sum(each) / sum(counts) for each, counts in epochs], rel=1e-6)
    data = objects.data()
    known = {tuple(x.flatten().tolist()): default_collate([y])[0] for x, y in (data[index] for index in range(COUNT))}
    assert len(seen) == 12
    for x, y in seen:
        assert all(torch.equal(known[tuple(row.tolist())], own) for row, own in zip(x, y, strict=True))


IN_PARTS = {"train.micro_batch": 4}
CASES = {
    1: [("BatchNorm", {"train.micro_batch": 5}), ("weighted", IN_PARTS)],
    2: [
        *((name, {}) for name in ("three columns", "numbers", "several classes at once", "classes")),
        ("BatchNorm", IN_PARTS),
        ("BatchNorm", {"cluster.shares": [12, 4]}),
        *(("three columns", {}, {"mesh": "a=2", "0": f"{one}@a", "2": f"{two}@a"}) for one, two in ("nn", "oi", "on")),
        *(("classes", {**parts}, {"mesh": "dp=2", **plan}) for parts in ({}, IN_PARTS)
          for plan in ({"0": "o@dp"}, {"2": "o@dp", "loss": "r@dp", "input": "n@dp"})),
    ],
    3: [
        *((name, {"train.micro_batch": 5}) for name in ("one column", "arrays", "weighted")),
        ("BatchNorm", {}),
        ("shaped", {}),
        ("weighted", {}),
        *(("classes", parts, {"mesh": "dp=3", "0": "o@dp", "2": "i@dp", "loss": "r@dp"}) for parts in ({}, IN_PARTS)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("size", CASES)
def test_several_processes_or_parts_make_the_same_updates(alone, size):
    assert {case[0] for cases in CASES.values() for case in cases} == OBJECTS.keys()
    for case, several in zip(CASES[size], by_case(size, _trained, CASES[size]), strict=True):
        weights, losses, evaluated, _ = alone[case[0]]
        for found in several:
            assert_close(found[0], weights)
            assert found[1] == pytest.approx(losses, rel=1e-9), case
            assert found[2] == pytest.approx(evaluated, rel=1e-9), case
            most = case[1].get("train.micro_batch", BATCH)
            assert len(case) == 3 or max(len(x) for x, _ in found[3]) <= most


def _refused(world):
    with pytest.raises(UserError, match="loss") as caught:
        _trained(world, "classes", {}, {"mesh": "dp=2", "2": "o@dp", "loss": "o@dp"})
    return caught.value.message


def test_split_classes_of_a_loss_that_the_user_computes_and_measured_shares_are_refused():
    assert len(set(run_on_ranks(_refused, 2))) == 1
    with pytest.raises(UserError, match="not available in a session"):
        _trained(World(0, 2, 0, 2), "BatchNorm", {"cluster.shares": "auto"})


@pytest.mark.parametrize("y", [lambda _: "far", lambda value: torch.zeros(1 + (value > 0)), lambda _: {"a": 1.0}])
def test_targets_that_make_no_tensor_are_refused(y):
    net, refused = nn.Linear(5, 1).double(), r"^the targets y can't be collated|^the target y is a (str|dict)"
    with opened(World()) as here, pytest.raises(UserError, match=refused):
        next(iter(here.prepare(net, torch.optim.SGD(net.parameters(), 0.2), Curve(y), batch=BATCH)[2]))


def test_no_share_of_right_guesses_is_said_of_targets(tmp_path):
    net = layers(5, 3)
    with manyhands.session(out=tmp_path / "run", run__report=False) as here:
        model, optimizer, batches = here.prepare(
            net, torch.optim.SGD(net.parameters(), 0.2), _columns(3), batch=BATCH
        )  # fmt: skip
        for x, y in batches:
            here.backward(F.mse_loss(model(x), y))
            optimizer.step()
    assert all(step.top1 != step.top1 for step in read_run(tmp_path / "run").steps)
