"""The user's own loop: collectives, subgroups, and the same updates on any number of processes."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.utils.data import TensorDataset

from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.train.session import Session
from tests.processes.ranks import run_on_ranks


def _session(world):
    return Session(world, load_job({"data.name": "objects", "train.norm_group": 4}, environment={}).job)


def _collectives(world):
    s = _session(world)
    mine = torch.tensor([float(s.rank), 1.0])
    assert s.all_reduce(mine).tolist() == [3.0, 3.0]
    assert s.all_reduce(mine, "mean").tolist() == [1.0, 1.0]
    assert s.all_reduce(mine, "max").tolist() == [2.0, 1.0]
    assert s.all_gather(mine)[:, 0].tolist() == [0.0, 1.0, 2.0]
    assert s.broadcast(mine, source=2).tolist() == [2.0, 1.0]
    rows = torch.arange(6.0).view(3, 2)
    assert s.scatter(rows, source=1).tolist() == rows[s.rank].tolist()
    assert s.reduce_scatter(rows).tolist() == (3 * rows[s.rank]).tolist()
    assert mine.tolist() == [float(s.rank), 1.0]
    s.barrier()
    pair, other = s.new_group([0, 2]), s.new_group([1])
    if s.rank == 1:
        assert other.all_reduce(mine).tolist() == mine.tolist()
        with pytest.raises(UserError, match="not one of ranks 0, 2"):
            pair.all_reduce(mine)
    else:
        assert pair.all_reduce(mine).tolist() == [2.0, 2.0]
        assert pair.rank == (0 if s.rank == 0 else 1)
    with pytest.raises(UserError, match="distinct ranks"):
        s.new_group([0, 3])
    return s.rank, s.size, s.is_main


def test_collectives_and_subgroups_of_three():
    assert run_on_ranks(_collectives, 3) == [(0, 3, True), (1, 3, False), (2, 3, False)]


def _own_loop(world):
    s = _session(world)
    torch.manual_seed(1)
    images = torch.randn(53, 1, 6, 6, dtype=torch.float64)
    labels = (images.sum((1, 2, 3)) > 0).long() + (images[:, 0, 0, 0] > 1).long()
    data = TensorDataset(images, labels)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    model, optimizer, batches = s.prepare(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), data, batch=17)
    for _ in s.epochs(4):
        for x, y in batches:
            s.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    found = s.evaluate(model, data)
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}, found.loss, found.count


@pytest.mark.parametrize("size", [2, 3])
def test_an_own_loop_makes_the_same_updates(size):
    ((wanted, loss, count),) = run_on_ranks(_own_loop, 1)
    assert count == 53
    assert loss < 1.0
    for weights, other_loss, other_count in run_on_ranks(_own_loop, size):
        assert other_count == 53
        assert other_loss == pytest.approx(loss, rel=1e-9)
        for name, tensor in wanted.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12)
