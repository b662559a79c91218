"""Sums through memory, on one machine and on several: right to the bit, and a lost peer is noticed."""

import copy
import functools
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from manyhands.core.world import World
from manyhands.parallel.group.rendezvous import is_peer_loss
from manyhands.parallel.modes import data
from manyhands.parallel.modes.data import SharedMemoryNetwork, TwoLevelNetwork
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.replicas.shared_memory import SLOT_BYTES, SharedSums, ranks_by_machine, share_memory
from manyhands.train.status import count_collectives
from tests.processes.ranks import put_on_machines, run_on_ranks
from tests.processes.updates import EXACT, SMALL, assert_alike, built, captured, make_updates, normed

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory without a name")
SLOW = pytest.mark.slow
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
ONE_OF_2, ONE_OF_3, ALL_APART = [[0, 1]], [[0, 1, 2]], [[0], [1], [2]]
TWO_AND_TWO, TWO_AND_ONE = [[0, 1], [2, 3]], [[0, 1], [2]]


def _size(machines):
    return sum(map(len, machines))


def _opened(world, group=None, slot_bytes=SLOT_BYTES):
    machines = ranks_by_machine(world, group)
    assert isinstance(machines, list), machines
    sums = share_memory(machines, world, group, slot_bytes)
    assert isinstance(sums, SharedSums), sums
    return sums


def _values(seed, rank, count, kind=torch.float32):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 100).to(kind)


def _in_order(seed, size, count, kind=torch.float32):
    total = _values(seed, 0, count, kind) + _values(seed, 1, count, kind)
    for rank in range(2, size):
        total += _values(seed, rank, count, kind)
    return total


def _any_values(world):
    channels = {slot_bytes: _opened(world, slot_bytes=slot_bytes) for slot_bytes in (64, 4096, SLOT_BYTES)}

    # Drawn alike on all processes.
    @settings(derandomize=True, database=None, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(list(channels)), st.integers(0, 3000), st.sampled_from(KINDS), st.integers(0, 99))
    def tried(slot_bytes, count, kind, seed):
        values = _values(seed, world.rank, count, kind)
        channels[slot_bytes].all_reduce(values)
        assert torch.equal(values, _in_order(seed, world.size, count, kind))

    tried()
    for channel in channels.values():
        channel.close()


def _several_at_once(world):
    group = dist.new_group(list(range(world.size)))
    channels = [_opened(world), _opened(world, group), _opened(world, slot_bytes=4096)]
    wrong = []

    def add_up(number):
        for turn in range(150):
            count = 1 + (turn * 97 + number * 31) % 5000
            values = _values(turn + number, world.rank, count)
            channels[number].all_reduce(values)
            if not torch.equal(values, _in_order(turn + number, world.size, count)):
                wrong.append((number, turn))

    # They begin in another order on each process; and one of gloo's goes on beside them.
    threads = [threading.Thread(target=add_up, args=((number + world.rank) % 3,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        one = torch.ones(1000)
        dist.all_reduce(one)
        assert one.eq(world.size).all()
    for thread in threads:
        thread.join()
    for channel in channels:
        channel.close()
    return wrong


def _crowded(world):
    """Four processes on two cores; while one is away for 2 s, the others compute nothing."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    sums = _opened(world)
    for turn in range(200):
        values = _values(turn, world.rank, 500)
        sums.all_reduce(values)
        assert torch.equal(values, _in_order(turn, world.size, 500))
    before = time.process_time()
    if world.rank == 0:
        time.sleep(2)
    sums.all_reduce(torch.ones(3))
    sums.close()
    return time.process_time() - before


def _network():
    """With a frozen parameter, and another memory format than a job asks for."""
    network = normed()
    network[0].bias.requires_grad_(False)
    network[4].to(memory_format=torch.channels_last)
    return network


def _updated(world, machines=(), slot_bytes=SLOT_BYTES):
    """Weights after some updates, and how many collectives these took: all of them, and those that memory can't do."""
    if machines:
        put_on_machines(machines, world)
    share_memory.__defaults__ = None, slot_bytes
    flags = {**SMALL, **EXACT, "train.norm_group": 8, "train.micro_batch": 0 if world.alone else 4}
    with built(world, _network(), flags) as trainer:
        kind = SharedMemoryNetwork if len(machines) == 1 else TwoLevelNetwork
        assert isinstance(trainer.network, kind) or world.alone
        before, through_memory = count_collectives(), SharedSums.begun
        make_updates(trainer, 3)
        begun, through_memory = count_collectives() - before, SharedSums.begun - through_memory
        assert copy.deepcopy(trainer.network.model)[1].groups.layers
        return captured(trainer).model, begun, begun - through_memory


REASONS = [
    (ModeRequest(shared_memory=False), False, "parallel.shared_memory is false"),
    (ModeRequest(hook=bf16_compress_hook), False, "the sync method transforms"),
    (ModeRequest(unused=True), False, "some parameters get no gradient"),
    (ModeRequest(), True, "some gradients are sparse"),
]


WAYS = [
    *((machines, *reason) for machines in (ONE_OF_3, TWO_AND_ONE) for reason in REASONS),
    (ALL_APART, ModeRequest(), False, "the processes are on several"),
]


def _how(world):
    """By what gradients are averaged, and what is said of it."""
    found = []
    for machines, request, sparse, _ in WAYS:
        put_on_machines(machines, world)
        network = data.apply(nn.Embedding(4, 2, sparse=True) if sparse else nn.Linear(3, 2), world, request)
        network.close()
        found.append((type(network), network.traits.averaging))
    return found


def _of_all(world):
    if world.size == 4:
        return (_crowded(world),)
    put_on_machines([range(world.size)], world)
    _any_values(world)
    wrong = _several_at_once(world)
    updated = [_updated(world, *how) for how in MACHINES[world.size]]
    return wrong, updated, _how(world) if world.size == 3 else []


# Through slots that are large and small.
MACHINES = {2: [(ONE_OF_2,), (ONE_OF_2, 64)], 3: [(ONE_OF_3,), (ONE_OF_3, 64), (TWO_AND_ONE,)]}


@pytest.fixture(scope="module")
def found():
    """By number of processes, and by what is tried: what each process found."""
    return {size: list(zip(*run_on_ranks(_of_all, size), strict=True)) for size in (2, 3, 4)}


@pytest.mark.parametrize("size", [2, 3])
def test_any_values_are_added_up_in_the_order_of_ranks_to_the_last_bit_also_several_at_once(size, found):
    assert found[size][0] == ([],) * size


def test_those_who_wait_leave_the_processors_to_others(found):
    assert max(found[4][0]) < 1


@pytest.mark.parametrize("size", [2, 3])
def test_updates_are_those_of_one_process_beside_batch_norms_sums(size, found):
    alone, *_ = _updated(World())
    for (machines, *_), several in zip(MACHINES[size], zip(*found[size][1], strict=True), strict=True):
        for weights, begun, by_gloo in several:
            assert_alike(weights, alone, 1e-9)
            assert_alike(weights, several[0][0])
            # The hung rank is found from the number of collectives that each process has started.
            assert begun == several[0][1] > 0
            assert len(machines) > 1 or by_gloo == 0, "BatchNorm's sums go through memory too"


def test_other_gradients_are_averaged_by_the_backend_which_says_why(found):
    for answers in found[3][2]:
        for (*_, why), (kind, said) in zip(WAYS, answers, strict=True):
            assert kind is ParallelNetwork
            assert f"averaged by gloo: {why}" in said


def _until_one_ends(folder, rank, machines, victim, how):
    """Adds up, or on several machines trains, for ever; `victim` ends in turn 50. What the others hear is noted."""
    size, patience_s = _size(machines), 4.0 if how == "stops" else 60.0
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    world = World(rank, size, rank, size, "cpu", "gloo", patience_s)
    put_on_machines(machines, world)
    if len(machines) == 1:
        ends = _opened(world)
        act = functools.partial(ends.all_reduce, torch.ones(100))
    else:
        model = nn.Sequential(nn.Linear(300, 600), nn.Linear(600, 600), nn.Linear(600, 3))
        ends = data.apply(model, world, ModeRequest())
        assert isinstance(ends, TwoLevelNetwork)

        def act():
            ends.call(torch.ones(2, 300)).sum().backward()
            ends.finish_gradients()

    place = folder / str(rank)

    def act_for_ever():
        for turn in range(1_000_000):
            place.write_text(f"{turn} {time.monotonic()}")
            if rank == victim and turn == 50:
                if how == "raises":
                    ends.close()
                    time.sleep(60)
                os.kill(os.getpid(), signal.SIGKILL if how == "is killed" else signal.SIGSTOP)
            act()

    with pytest.raises(RuntimeError) as raised:
        act_for_ever()
    assert is_peer_loss(raised.value), raised.value
    with place.open("a") as file:
        file.write(f" {time.monotonic()} {raised.value}")
    if len(machines) == 1:
        with pytest.raises(RuntimeError, match="already released"):
            ends.all_reduce(torch.ones(100))
    os._exit(7)  # as a worker leaves whose peer has gone


@pytest.mark.parametrize(
    ("machines", "victim", "how", "wanted"),
    [
        (ONE_OF_3, 1, "is killed", "remote process exited: rank 1"),
        pytest.param(ONE_OF_3, 1, "raises", "remote process exited: rank 1", marks=SLOW),
        (ONE_OF_3, 1, "stops", "Timed out waiting for rank 1"),
        (TWO_AND_ONE, 1, "is killed", ""),
        # Who speaks for the second machine, who speaks for the first, and another one.
        pytest.param(TWO_AND_TWO, 2, "is killed", "", marks=SLOW),
        pytest.param(TWO_AND_TWO, 0, "stops", "", marks=SLOW),
        pytest.param(TWO_AND_TWO, 3, "raises", "", marks=SLOW),
    ],
)
def test_a_process_that_ends_in_the_middle_is_heard_of_on_every_machine(machines, victim, how, wanted, tmp_path):
    before, context = set(Path("/dev/shm").iterdir()), multiprocessing.get_context("fork")
    children = [
        context.Process(target=_until_one_ends, args=(tmp_path, rank, machines, victim, how))
        for rank in range(_size(machines))
    ]
    for child in children:
        child.start()
    others = [rank for rank in range(len(children)) if rank != victim]
    for rank in others:
        children[rank].join(120)
    children[victim].kill()
    children[victim].join()
    assert [children[rank].exitcode for rank in others] == [7] * len(others)
    assert {one for one in set(Path("/dev/shm").iterdir()) - before if "manyhands" in one.name} == set()
    ended = float((tmp_path / str(victim)).read_text().split()[1])
    heard = [(tmp_path / str(rank)).read_text().split(" ", 3) for rank in others]
    for turn, _, at, said in heard:
        # All hear it in the same turn; a silent one is given time, one that has gone none.
        assert int(turn) == 50
        assert float(at) - ended < 30
        assert len(machines) > 1 or wanted in said or "remote process exited" in said
    assert any(wanted in said for *_, said in heard)
