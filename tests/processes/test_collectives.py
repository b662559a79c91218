"""Collectives give the same values in any memory layout, and plain data arrives as it was sent."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.world import World
from manyhands.parallel import apply
from manyhands.parallel.group.collectives import Subgroup, new_group
from manyhands.parallel.group.plain import broadcast_plain, broadcast_result, broadcast_tensors, gather_plain
from manyhands.parallel.mesh.grid import open_mesh
from manyhands.train.session import Session
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import built

MATRIX = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def _of_a_session(world):
    """All of three processes, as users call them; and a pair of them."""
    here = Session(world, load_job({"data.name": "objects"}, environment={}).job)
    mine = torch.tensor([float(here.rank), 1.0])
    assert here.all_reduce(mine).tolist() == [3.0, 3.0]
    assert here.all_reduce(mine, "mean").tolist() == [1.0, 1.0]
    assert here.all_reduce(mine, "max").tolist() == [2.0, 1.0]
    assert here.all_gather(mine)[:, 0].tolist() == [0.0, 1.0, 2.0]
    assert here.broadcast(mine, source=2).tolist() == [2.0, 1.0]
    rows = torch.arange(6.0).view(3, 2)
    assert here.scatter(rows, source=1).tolist() == rows[here.rank].tolist()
    assert here.reduce_scatter(rows).tolist() == (3 * rows[here.rank]).tolist()
    assert mine.tolist() == [float(here.rank), 1.0]
    # The same values in other strides on another process.
    turned = torch.arange(6.0).view(2, 3).t()
    strided = turned if world.rank == 0 else turned.contiguous()
    assert torch.equal(here.broadcast(strided), turned)
    assert torch.equal(here.all_reduce(strided), 3 * turned)
    assert torch.equal(here.all_gather(strided), torch.stack([turned] * 3))
    here.barrier()
    pair, other = here.new_group([0, 2]), here.new_group([1])
    if here.rank == 1:
        assert other.all_reduce(mine).tolist() == mine.tolist()
        with pytest.raises(UserError, match="not one of ranks 0, 2"):
            pair.all_reduce(mine)
    else:
        assert pair.all_reduce(mine).tolist() == [2.0, 2.0]
        assert pair.rank == (0 if here.rank == 0 else 1)
    with pytest.raises(UserError, match="distinct ranks"):
        here.new_group([0, 3])
    return here.rank, here.size, here.is_main


def _to_others(world):
    """Each collective on a group whose members are numbered otherwise than their ranks; rank 0 is none of them."""
    group, everybody = new_group(world, [1, 2]), Subgroup(range(world.size), world.rank, None)
    mine = MATRIX * 10**world.rank
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


TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "number": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "nothing": torch.zeros(0, 4),
}
ERRORS = [
    kind and kind("the plan is damaged", "plan.json", ("choose another",)) for kind in (UserError, RunError, None)
]


def _plain_data(world):
    mine = {"rank": world.rank, "words": "众手" * world.rank, "best": math.inf}
    tensors = broadcast_tensors(TENSORS if world.rank == 0 else {}, world)
    sent = gather_plain(mine, world), broadcast_plain(mine if world.rank == 0 else None, world), tensors
    return *sent, [_result(world, error) for error in ERRORS]


def _result(world, error):
    """What rank 0 alone makes, or why it can't."""

    def make():
        assert world.is_main, "rank 0 alone makes it"
        if error:
            raise error
        return {"value": 3}

    try:
        return broadcast_result(make, world)
    except ManyhandsError as raised:
        return type(raised), raised.message, raised.where, raised.hints


def _all(world):
    return _of_a_session(world), _to_others(world), _plain_data(world)


@pytest.fixture(scope="module")
def answers():
    """Of three processes: what each had of sessions, of groups and of plain data."""
    found = list(zip(*run_on_ranks(_all, 3), strict=True))
    assert found[0] == ((0, 3, True), (1, 3, False), (2, 3, False))
    return found


def test_reduce_gather_all_to_all_send_and_receive(answers):
    _, first, second = everybody = answers[1]
    for rank, found in enumerate(everybody):
        # Exchanging twice brings everything back: rows [from, to] become [to, from].
        assert torch.equal(found["exchanged"], torch.stack([one["rows"][rank] for one in everybody]))
    assert first["summed"] is None
    assert torch.equal(second["summed"], 110 * MATRIX)
    assert torch.equal(first["mean"], 55 * MATRIX)
    assert torch.equal(first["largest"], 100 * MATRIX)
    assert (second["mean"], second["largest"], first["gathered"]) == (None, None, None)
    assert torch.equal(second["gathered"], torch.stack([10 * MATRIX.t(), 100 * MATRIX.t()]))
    assert torch.equal(second["received"], 10 * MATRIX.t())
    assert torch.equal(first["received"], 10 * MATRIX.t() + 1)


def test_every_process_gets_the_same_plain_data_or_the_same_error(answers):
    for gathered, sent, tensors, results in answers[2]:
        assert gathered == [{"rank": rank, "words": "众手" * rank, "best": math.inf} for rank in range(3)]
        assert sent == gathered[0]
        assert list(tensors) == list(TENSORS)
        for name, wanted in TENSORS.items():
            assert tensors[name].dtype == wanted.dtype
            assert torch.equal(tensors[name], wanted)
        said = [(kind, "the plan is damaged", "plan.json", ("choose another",)) for kind in (UserError, RunError)]
        assert results == [*said, {"value": 3}]


def test_one_process_has_the_same_collectives_and_mistakes_are_named():
    alone = Subgroup([0], 0, None)
    values = torch.tensor([[1.0, 2.0]])
    for result in (alone.reduce(values), alone.all_to_all(values), alone.gather(values)[0]):
        assert torch.equal(result, values)
    for wrong in (
        lambda: alone.send(values, 0),
        lambda: alone.reduce(values, 1),
        lambda: alone.all_to_all(torch.zeros(2, 2)),
        lambda: alone.reduce_scatter(torch.tensor(1.0)),
    ):
        with pytest.raises(UserError):
            wrong()


def _wait_in_vain(world):
    """Rank 0 calls, the others don't: in a subgroup, and along an axis of a mesh."""
    impatient = dataclasses.replace(world, collective_timeout_s=1.0)
    for one in (new_group(impatient, [0, 1]), open_mesh("dp=2,tp=2", impatient).axis("tp")):
        if world.is_main:
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                one.all_reduce(torch.ones(1))
        dist.barrier()


@pytest.mark.slow
def test_subgroups_and_axes_of_a_mesh_give_a_silent_peer_up_when_the_job_says():
    run_on_ranks(_wait_in_vain, 4)


def test_a_checksum_does_not_depend_on_the_pieces_and_sees_every_exchange(monkeypatch):
    values = torch.randn(1001)
    order = [700, *range(1, 700), 0, *range(701, 1001)]
    tensors = [values, values[order], torch.zeros(0), torch.tensor(3)]
    whole_sums = apply.checksums(tensors)
    monkeypatch.setattr(apply, "CHECKED_AT_ONCE", 64)
    assert torch.equal(apply.checksums(tensors), whole_sums)
    assert whole_sums[0, 0] == whole_sums[1, 0]
    assert whole_sums[0, 1] != whole_sums[1, 1]


def test_a_mode_that_copies_layers_keeps_torchs_own_batch_norm():
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 5))
    flags = {"data.name": "synthetic:40x1x8x8x5", "train.batch": 8}
    with built(World(), network, flags, mode="dataparallel") as trainer:
        assert type(network[0]) is nn.BatchNorm2d
        trainer.updater(next(trainer.feed.updates(0, 0)), 0)
        assert network[0].num_batches_tracked == 1
