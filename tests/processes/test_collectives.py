"""Collectives give the same values whatever the memory layout, and replicas are compared bit by bit."""

import torch
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel import apply
from manyhands.parallel.collectives import whole
from manyhands.train.job import build
from manyhands.train.samples import Objects
from tests.processes.ranks import run_on_ranks


def _exchange(world):
    turned = torch.arange(6.0).view(2, 3).t()
    mine = turned if world.rank == 0 else turned.contiguous()
    everybody = whole(world)
    return everybody.broadcast(mine), everybody.all_reduce(mine), everybody.all_gather(mine)


def test_processes_may_hold_the_same_values_in_other_strides():
    wanted = torch.arange(6.0).view(2, 3).t()
    for sent, added, gathered in run_on_ranks(_exchange, 2):
        assert torch.equal(sent, wanted)
        assert torch.equal(added, 2 * wanted)
        assert torch.equal(gathered, torch.stack([wanted, wanted]))


def test_a_checksum_does_not_depend_on_the_pieces_and_sees_every_exchange(monkeypatch):
    values = torch.randn(1001)
    exchanged = values[
        torch.cat([torch.tensor([700]), torch.arange(1, 700), torch.tensor([0]), torch.arange(701, 1001)])
    ]
    whole_sums = apply.checksums([values, exchanged, torch.zeros(0), torch.tensor(3)])
    monkeypatch.setattr(apply, "CHECKED_AT_ONCE", 64)
    assert torch.equal(apply.checksums([values, exchanged, torch.zeros(0), torch.tensor(3)]), whole_sums)
    assert whole_sums[0, 0] == whole_sums[1, 0]
    assert whole_sums[0, 1] != whole_sums[1, 1]


def test_a_mode_that_copies_layers_keeps_torchs_own_batch_norm(tmp_path):
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 5))
    job = load_job({"data.name": "synthetic:40x1x8x8x5", "train.batch": 8}, environment={}).job
    parts = build(job, RunFolder(tmp_path), World(), "dataparallel", Objects(network))
    assert type(network[0]) is nn.BatchNorm2d
    parts.update(next(parts.feed.updates(0, 0)), 0)
    assert network[0].num_batches_tracked == 1
