"""Gradients in two levels: equal bits on all processes, the updates of one process, and a lost peer is noticed."""

import contextlib
import multiprocessing
import os
import platform
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from manyhands.config.load import load_job
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.data.order import BatchSharing
from manyhands.parallel.modes import data
from manyhands.parallel.modes.data import TwoLevelNetwork
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.train.build import build
from manyhands.train.loop import fit
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.train.state import capture
from manyhands.train.status import collectives_begun
from manyhands.worker.failure import is_consequence
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import network, train

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory without a name")

TWO_AND_TWO, TWO_AND_ONE, DEALT_IN_TURNS = [[0, 1], [2, 3]], [[0, 1], [2]], [[0, 2], [1, 3]]
PLACES = [TWO_AND_ONE, pytest.param(TWO_AND_TWO, marks=pytest.mark.slow)]


def _size(machines):
    return sum(map(len, machines))


def _settle_on(machines, world):
    """Has this process believe that it is on one of several machines."""
    place = next(place for place, ranks in enumerate(machines) if world.rank in ranks)
    platform.node = lambda: f"machine {place}"


def _values(seed, rank, count, kind=torch.float64):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 100).to(kind)


def _network():
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 7)]
    network = nn.Sequential(*layers).double()
    network.spare = nn.Parameter(torch.ones(4, dtype=torch.float64))
    group_batch_norms(network)
    return network


def _two_updates(network, size, rank, count):
    """Gradients of two updates of two micro-batches, whose `count` samples each are one group of BatchNorm; buffers."""
    found = []
    for update in range(2):
        network.model.zero_grad()
        for part in range(2):
            mine = BatchSharing(size, 0, count).micro_batches(count)[0][rank]
            network.norms.begin_micro_batch(mine.spans, mine.shared_groups, mine.count, 2 * count)
            pictures = _values(2 * update + part, 0, count * 48).view(count, 3, 4, 4)[mine.start : mine.stop]
            with network.traits.no_sync() if part == 0 else contextlib.nullcontext():
                # One process alone uses `spare`.
                spare = network.model.spare.sum() if rank == size - 1 else 0
                loss = network.call(pictures).square().sum() + spare
                (
                    (network.traits.reach_all(loss) if part and network.traits.reach_all else loss)
                    * network.traits.gradient_scale
                ).backward()
        network.finish_gradients()
        network.finish_update()
        found.append({name: one.grad.clone() for name, one in network.model.named_parameters()})
    return found, dict(network.model.named_buffers())


def _updated(world, machines):
    _settle_on(machines, world)
    network = data.apply(_network(), world, ModeRequest())
    assert isinstance(network, TwoLevelNetwork)
    before = collectives_begun()
    found = _two_updates(network, world.size, world.rank, 12)
    network.close()
    return found, collectives_begun() - before


@pytest.mark.parametrize("machines", [*PLACES, pytest.param(DEALT_IN_TURNS, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process_beside_batch_norms_sums(machines):
    """Micro-batches are added up, a parameter is used by one process alone, and BatchNorm's sums go on meanwhile."""
    size, model = _size(machines), _network()
    several = run_on_ranks(_updated, size, machines)
    gradients, buffers = _two_updates(ParallelNetwork(model), 1, 0, 12)
    for (found, own_buffers), begun in several:
        torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own_buffers, buffers, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found, several[0][0][0], rtol=0, atol=0)
        # Who hangs is told from how many collectives each process has come to.
        assert begun == several[0][1] > 0


def _on_machines(world, machines, function, *arguments):
    _settle_on(machines, world)
    return function(world, *arguments)


@pytest.mark.parametrize("machines", PLACES)
@pytest.mark.parametrize("more", [{}, {"train.micro_batch": 4}], ids=["plain", "accumulation"])
def test_several_processes_make_the_updates_of_one(machines, more):
    settings = {"train.precision": "fp64", "train.channels_last": False, "train.norm_group": 4, **more}
    size = _size(machines)
    several = run_on_ranks(_on_machines, size, machines, train, 8, "data", True, settings)
    (_, wanted, _), *_ = run_on_ranks(train, 1, 8, "single", True, settings)
    for _, weights, _ in several:
        for name, one in wanted.items():
            torch.testing.assert_close(weights[name], several[0][1][name], rtol=0, atol=0)
            assert (weights[name] - one).abs().max() <= 1e-9 * max(one.abs().max().item(), 1e-12), name


def _run_on(world, folder, max_steps):
    """A part of a run; its weights, and what it says of averaging."""
    flags = {
        "data.name": "synthetic:103x1x8x8x5", "train.batch": 29, "train.epochs": 9, "train.max_steps": max_steps,
        "train.norm_group": 4, "checkpoint.every": "4steps", "parallel.mode": "data",
    }  # fmt: skip
    place = RunFolder(Path(folder))
    torch.manual_seed(3)
    trainer = build(
        Parts.from_job(load_job(flags, environment={}).job, place, world, "data", Objects(network(norm=True)))
    )
    fit(trainer)
    snapshot = capture(trainer.network, trainer.updater.optimizer, trainer.progress, {})
    trainer.resources.close()
    return snapshot.model, trainer.network.traits.averages


@pytest.mark.parametrize("machines", PLACES)
def test_a_resumed_run_has_the_same_bits(machines, tmp_path):
    size = _size(machines)
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    whole = run_on_ranks(_on_machines, size, machines, _run_on, tmp_path / "whole", 7)
    run_on_ranks(_on_machines, size, machines, _run_on, tmp_path / "broken", 4)
    resumed = run_on_ranks(_on_machines, size, machines, _run_on, tmp_path / "broken", 7)
    for (weights, averages), (own, own_averages) in zip(whole, resumed, strict=True):
        assert averages == own_averages
        assert averages.startswith("gradients are averaged in two levels")
        torch.testing.assert_close(own, weights, rtol=0, atol=0)


def _how(world, machines, request, sparse=False):
    _settle_on(machines, world)
    model = nn.Embedding(4, 2, sparse=True) if sparse else nn.Linear(3, 2)
    made = data.apply(model, world, request)
    made.close()
    return made.traits.averages


ALL_APART = [[0], [1], [2]]


@pytest.mark.parametrize(
    ("machines", "request_", "sparse", "why"),
    [
        (ALL_APART, ModeRequest(), False, "the processes are on several"),
        (TWO_AND_ONE, ModeRequest(shared_memory=False), False, "parallel.shared_memory is false"),
        (TWO_AND_ONE, ModeRequest(hook=bf16_compress_hook), False, "the sync method transforms"),
        (TWO_AND_ONE, ModeRequest(), True, "some gradients are sparse"),
        (TWO_AND_ONE, ModeRequest(unused=True), False, "some parameters get no gradient"),
    ],
)
def test_other_gradients_are_averaged_by_the_backend(machines, request_, sparse, why):
    for averages in run_on_ranks(_how, 3, machines, request_, sparse):
        assert f"averaged by gloo: {why}" in averages


def _train_for_ever(network, rank, victim, how, place):
    for turn in range(1_000_000):
        place.write_text(f"{turn} {time.monotonic()}")
        if rank == victim and turn == 10:
            if how == "raises":
                network.close()
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL if how == "is killed" else signal.SIGSTOP)
        network.call(torch.ones(2, 300)).sum().backward()
        network.finish_gradients()


def _until_one_ends(folder, rank, machines, victim, how):
    size = _size(machines)
    patience = timedelta(seconds=4 if how == "stops" else 60)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    world = World(rank, size, rank, size, "cpu", "gloo", patience.total_seconds())
    _settle_on(machines, world)
    model = nn.Sequential(nn.Linear(300, 600), nn.Linear(600, 600), nn.Linear(600, 3))
    made = data.apply(model, world, ModeRequest())
    assert isinstance(made, TwoLevelNetwork)
    place = folder / str(rank)
    with pytest.raises(RuntimeError) as raised:
        _train_for_ever(made, rank, victim, how, place)
    assert is_consequence(raised.value), raised.value
    with place.open("a") as file:
        file.write(f" {time.monotonic()} {raised.value}")
    os._exit(7)  # as a worker leaves whose peer has gone


def _who_hears(folder, machines, victim, how):
    """What each process but the victim said, and how long after it had begun its last update."""
    before, size = set(Path("/dev/shm").iterdir()), _size(machines)
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=_until_one_ends, args=(folder, rank, machines, victim, how)) for rank in range(size)
    ]
    for child in children:
        child.start()
    others = [rank for rank in range(size) if rank != victim]
    for rank in others:
        children[rank].join(120)
    children[victim].kill()
    children[victim].join()
    assert [children[rank].exitcode for rank in others] == [7] * len(others)
    assert {one for one in set(Path("/dev/shm").iterdir()) - before if "manyhands" in one.name} == set()
    ended = float((folder / str(victim)).read_text().split()[1])
    heard = [(folder / str(rank)).read_text().split(" ", 3) for rank in others]
    # All hear it in the same update.
    assert {int(turn) for turn, *_ in heard} == {10}
    return {rank: (float(at) - ended, said) for rank, (_, _, at, said) in zip(others, heard, strict=True)}


@pytest.mark.parametrize(
    ("machines", "victim", "how"),
    [
        (TWO_AND_ONE, 1, "is killed"),
        *[pytest.param(TWO_AND_TWO, victim, "is killed", marks=pytest.mark.slow) for victim in range(4)],
        pytest.param(TWO_AND_ONE, 2, "is killed", marks=pytest.mark.slow),
        pytest.param(TWO_AND_TWO, 1, "raises", marks=pytest.mark.slow),
        pytest.param(TWO_AND_TWO, 3, "stops", marks=pytest.mark.slow),
        pytest.param(TWO_AND_TWO, 0, "stops", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_in_the_middle_is_heard_of_on_every_machine(machines, victim, how, tmp_path):
    for rank, (seconds, said) in _who_hears(tmp_path, machines, victim, how).items():
        assert seconds < 30, (rank, said)
