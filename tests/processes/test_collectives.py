"""Collectives give the same values whatever the memory layout, and replicas are compared bit by bit."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel import apply
from manyhands.parallel.group.collectives import new_group, world_group
from manyhands.parallel.mesh.grid import open_mesh
from manyhands.train.build import build
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from tests.processes.ranks import run_on_ranks


def _exchange(world):
    turned = torch.arange(6.0).view(2, 3).t()
    mine = turned if world.rank == 0 else turned.contiguous()
    everybody = world_group(world)
    return everybody.broadcast(mine), everybody.all_reduce(mine), everybody.all_gather(mine)


def test_processes_may_hold_the_same_values_in_other_strides():
    wanted = torch.arange(6.0).view(2, 3).t()
    for sent, added, gathered in run_on_ranks(_exchange, 2):
        assert torch.equal(sent, wanted)
        assert torch.equal(added, 2 * wanted)
        assert torch.equal(gathered, torch.stack([wanted, wanted]))


def _pass_on(world):
    """Each collective on a group whose members are numbered otherwise than their ranks; rank 0 is none of them."""
    group = new_group(world, [1, 2])
    everybody = world_group(world)
    mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).mul(10**world.rank)
    rows = torch.stack([mine[0] + 100 * to for to in range(3)])
    found = {"exchanged": everybody.all_to_all(rows), "rows": rows}
    if group.rank < 0:
        return found
    found |= {
        "summed": group.reduce(mine, target=1),
        "mean": group.reduce(mine, 0, "mean"),
        "largest": group.reduce(mine, 0, "max"),
        "gathered": group.gather(mine.t(), target=1),
    }
    if group.rank == 0:
        group.send(mine.t(), 1)
        found["received"] = group.receive(mine, 1)
    else:
        found["received"] = group.receive(mine, 0)
        group.send(found["received"] + 1, 0)
    return found


def test_reduce_gather_all_to_all_send_and_receive():
    outside, first, second = run_on_ranks(_pass_on, 3)
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    everybody = [outside, first, second]
    for rank, found in enumerate(everybody):
        # Exchanging twice brings everything back: rows [from, to] become [to, from].
        assert torch.equal(found["exchanged"], torch.stack([one["rows"][rank] for one in everybody]))
    assert first["summed"] is None
    assert torch.equal(second["summed"], 110 * matrix)
    assert torch.equal(first["mean"], 55 * matrix)
    assert torch.equal(first["largest"], 100 * matrix)
    assert (second["mean"], second["largest"], first["gathered"]) == (None, None, None)
    assert torch.equal(second["gathered"], torch.stack([10 * matrix.t(), 100 * matrix.t()]))
    assert torch.equal(second["received"], 10 * matrix.t())
    assert torch.equal(first["received"], 10 * matrix.t() + 1)


def test_one_process_has_the_same_collectives_and_mistakes_are_named():
    alone = world_group(World())
    values = torch.tensor([[1.0, 2.0]])
    for result in (alone.reduce(values), alone.all_to_all(values), alone.gather(values)[0]):
        assert torch.equal(result, values)
    for wrong in (
        lambda: alone.send(values, 0),
        lambda: alone.receive(values, 0),
        lambda: alone.reduce(values, 1),
        lambda: alone.broadcast(values, -1),
        lambda: alone.all_to_all(torch.zeros(2, 2)),
        lambda: alone.reduce_scatter(torch.tensor(1.0)),
    ):
        with pytest.raises(UserError):
            wrong()


def _wait_in_vain(world):
    """Rank 0 calls, rank 1 doesn't: in a subgroup, and along an axis of a mesh."""
    impatient = dataclasses.replace(world, collective_timeout_s=1.0)
    group, grid = new_group(impatient, [0, 1]), open_mesh("dp=2,tp=2", impatient)
    heard = []
    for number, call in enumerate((lambda: group.all_reduce(torch.ones(1)), lambda: _along(grid))):
        if world.rank == 0:
            try:
                call()
            except RuntimeError as error:
                heard.append(str(error))
            dist.distributed_c10d._get_default_store().set(f"heard/{number}", "1")
        dist.distributed_c10d._get_default_store().wait([f"heard/{number}"])
    return heard


def _along(grid):
    return grid.axis("tp").all_reduce(torch.ones(1))


@pytest.mark.slow
def test_subgroups_and_axes_of_a_mesh_give_a_silent_peer_up_when_the_job_says():
    heard, *others = run_on_ranks(_wait_in_vain, 4)
    assert len(heard) == 2
    assert all("timed out" in text.lower() for text in heard), heard
    assert others == [[], [], []]


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
    trainer = build(Parts.from_job(job, RunFolder(tmp_path), World(), "dataparallel", Objects(network)))
    assert type(network[0]) is nn.BatchNorm2d
    trainer.updater(next(trainer.feed.updates(0, 0)), 0)
    assert network[0].num_batches_tracked == 1
