"""BatchNorm over fixed groups is the same at any number of processes, and equals torch's own for one group."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.data.order import Cut
from manyhands.parallel.norm import group_batch_norms
from tests.processes.ranks import run_on_ranks


def _pass(world, count, group, micro):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))
    model = model.double().train()
    groups, _ = group_batch_norms(model)
    images = torch.randn(count, 2, 8, 8, dtype=torch.float64)
    for shares in Cut(world.size, micro, group).passes(count):
        share = shares[world.rank]
        groups.begin_pass(share.spans, share.shared_groups, share.count, count)
        rows = images[share.start : share.stop] if share.count else images[:1]
        output = model(rows)
        loss = (output.sin() * torch.arange(1, 4).view(1, 3, 1, 1)).sum() / count * (1 if share.count else 0)
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    if not world.alone:
        for gradient in gradients:
            dist.all_reduce(gradient)
    groups.finish_update(world.size)
    return gradients, [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize(
    ("size", "count", "group", "micro"),
    [
        (2, 37, 8, 0),
        (3, 37, 8, 0),
        (4, 37, 8, 0),
        (3, 20, 64, 0),
        (4, 3, 2, 0),
        (3, 40, 8, 6),
        (4, 33, 16, 4),
        (2, 1, 4, 0),
    ],
)
def test_same_gradients_and_statistics_at_any_number_of_processes(size, count, group, micro):
    wanted_gradients, wanted_buffers = _pass_alone(count, group)
    for gradients, buffers in run_on_ranks(_pass, size, count, group, micro):
        for got, wanted in zip(gradients, wanted_gradients, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
        for got, wanted in zip(buffers, wanted_buffers, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def _pass_alone(count, group):
    return run_on_ranks(_pass, 1, count, group, 0)[0]


def test_one_group_is_torchs_own_batch_norm():
    torch.manual_seed(0)
    ours, theirs = nn.BatchNorm2d(5), nn.BatchNorm2d(5)
    groups, restore = group_batch_norms(ours)
    images = torch.randn(16, 5, 4, 4)
    share = Cut(1, 0, 16).passes(16)[0][0]
    groups.begin_pass(share.spans, share.shared_groups, 16, 16)
    assert torch.equal(ours(images), theirs(images))
    groups.finish_update(1)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert int(ours.num_batches_tracked) == 1
    restore()
    assert type(ours) is nn.BatchNorm2d
