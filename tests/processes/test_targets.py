"""Targets that no class stands for, in a loop of one's own: the plain script's losses at any number of processes."""

import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import manyhands
from manyhands.core.errors import UserError
from manyhands.report.read import read_run
from tests.processes.ranks import run_on_ranks

COUNT, BATCH = 38, 12


def _images():
    return torch.randn(COUNT, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Curve(Dataset):
    """Gives y as a number of Python's or numpy's, or as an array."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        x = _images()[index]
        return x, self.kind(float(x.sum()))


def _of_columns(columns):
    images = _images()
    return TensorDataset(images, images[:, :columns].cumsum(1).sin())


SETS = {
    "one column": lambda: _of_columns(1),
    "three columns": lambda: _of_columns(3),
    "numbers": lambda: Curve(float),
    "arrays": lambda: Curve(lambda value: numpy.array([value, -value])),
    "several classes at once": lambda: TensorDataset(_images(), (_images()[:, :3] > 0).long()),
}


def _trained(world, name, micro_batch=0, out=None, plan=None):
    data = SETS[name]()
    y = torch.as_tensor(data[0][1])
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, y.numel())).double()
    seen, losses = [], []
    options = {"out": out, "run__report": False} if out else {}
    with manyhands.session(micro_batch=micro_batch, **options) as here:
        model, optimizer, batches = here.prepare(
            net, torch.optim.SGD(net.parameters(), 0.2), data, batch=BATCH, plan=plan
        )
        for _ in here.epochs(2):
            for x, target in batches:
                here.backward(F.mse_loss(model(x).view_as(target), target.double()))
                optimizer.step()
                seen.append((x, target))
            losses.append(here.mean_loss())
        if world is None or world.alone:
            with pytest.raises(UserError, match="y is not a whole number"):
                here.evaluate(model, data)
    return losses, {key: tensor.clone() for key, tensor in net.state_dict().items()}, seen


def _plain(name, seen):
    """The plain loop over the same batches."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, seen[0][1][0].numel())).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.2)
    for x, target in seen:
        optimizer.zero_grad()
        F.mse_loss(net(x).view_as(target), target.double()).backward()
        optimizer.step()
    return net.state_dict()


@pytest.fixture(scope="module", params=SETS)
def alone(request):
    return request.param, *_trained(None, request.param)


def test_one_process_makes_the_plain_loops_updates_of_the_ys_of_its_xs(alone):
    name, losses, weights, seen = alone
    assert losses[1] < losses[0]
    for key, tensor in _plain(name, seen).items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-9, atol=1e-12)
    data = SETS[name]()
    known = {tuple(x.tolist()): default_collate([y])[0] for x, y in (data[index] for index in range(COUNT))}
    assert len(seen) == 2 * -(-COUNT // BATCH)
    for x, target in seen:
        for row, y in zip(x, target, strict=True):
            assert torch.equal(known[tuple(row.tolist())], y)


@pytest.mark.parametrize(("size", "micro_batch"), [(2, 0), (3, 5)])
def test_several_processes_make_the_same(alone, size, micro_batch):
    name, losses, weights, _ = alone
    for found_losses, found, _ in run_on_ranks(_trained, size, name, micro_batch):
        assert found_losses == pytest.approx(losses, rel=1e-9)
        for key, tensor in weights.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("plan", [{"0": "n@a", "2": "n@a"}, {"0": "o@a", "2": "i@a"}, {"0": "o@a", "2": "n@a"}])
def test_a_plan_makes_the_same(plan):
    losses = _trained(None, "three columns")[0]
    for found, *_ in run_on_ranks(_trained, 2, "three columns", 0, None, {"mesh": "a=2", **plan}):
        assert found == pytest.approx(losses, rel=1e-9)


def test_no_share_of_right_guesses_is_said(tmp_path):
    _trained(None, "three columns", out=tmp_path / "run")
    assert all(step.top1 != step.top1 for step in read_run(tmp_path / "run").steps)


@pytest.mark.parametrize("y", [lambda _: "far", lambda value: torch.zeros(1 + (value > 0)), lambda _: {"a": 1.0}])
def test_what_makes_no_tensor_is_refused(y):
    def trained():
        with manyhands.session() as here:
            net = nn.Linear(5, 1).double()
            _, _, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.2), Curve(y), batch=BATCH)
            next(iter(batches))

    with pytest.raises(UserError, match=r"^the targets y can't be collated|^the target y is a (str|dict)"):
        trained()
