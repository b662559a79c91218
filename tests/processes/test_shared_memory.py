"""Sums through memory: right whatever is added up, right beside each other, heard of where a process ends."""

import copy
import multiprocessing
import os
import platform
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
from manyhands.data.order import BatchSharing
from manyhands.parallel.modes import data
from manyhands.parallel.modes.data import FlatNetwork
from manyhands.parallel.network import ModeRequest, ModeTraits, ParallelNetwork
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.parallel.replicas.shared_memory import (
    MOST_TRIES,
    ON_SEVERAL,
    SLOT_BYTES,
    SharedSums,
    machines_of_group,
    share_within,
    tries_after,
)
from manyhands.train.status import collectives_begun
from manyhands.worker.failure import is_consequence
from tests.processes.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory without a name")
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def test_who_was_far_once_and_comes_near_again_is_tried_for_again():
    tries = MOST_TRIES
    for waited_s, reached in ((0.1, 1), (1e-4, MOST_TRIES)):
        for _ in range(20):
            tries = tries_after(tries, waited_s)
        assert tries == reached


def _sums_or_why(world, group=None, slot_bytes=SLOT_BYTES):
    machines = machines_of_group(world, group)
    if isinstance(machines, str):
        return machines
    return ON_SEVERAL if len(machines) > 1 else share_within(machines, world, group, slot_bytes)


def _opened(world, group=None, slot_bytes=SLOT_BYTES):
    sums = _sums_or_why(world, group, slot_bytes)
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
        channels[slot_bytes].add_up(values)
        assert torch.equal(values, _in_order(seed, world.size, count, kind))

    tried()
    for channel in channels.values():
        channel.close()


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_any_values_are_added_up_in_the_order_of_ranks_to_the_last_bit(size):
    run_on_ranks(_any_values, size)


def _several_at_once(world):
    group = dist.new_group(list(range(world.size)))
    channels = [_opened(world), _opened(world, group), _opened(world, slot_bytes=4096)]
    wrong = []

    def add_up(number):
        for turn in range(150):
            count = 1 + (turn * 97 + number * 31) % 5000
            values = _values(turn + number, world.rank, count)
            channels[number].add_up(values)
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


@pytest.mark.parametrize("size", [2, 3])
def test_several_sums_at_once_do_not_meet(size):
    assert run_on_ranks(_several_at_once, size) == [[]] * size


def _some_elsewhere(world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if world.rank == 3:
        platform.node = lambda: "elsewhere"
    found = _sums_or_why(world), _sums_or_why(world, pairs[world.rank // 2])
    if world.rank < 2:
        assert isinstance(found[1], SharedSums)
        values = _values(5, world.rank, 10)
        found[1].add_up(values)
        assert torch.equal(values, _in_order(5, 2, 10))
        found[1].close()
    return found[0], found[1] if isinstance(found[1], str) else ""


def test_processes_of_several_machines_do_without():
    why = "the processes are on several machines"
    for rank, found in enumerate(run_on_ranks(_some_elsewhere, 4)):
        assert found == (why, why if rank > 1 else "")


def _crowded(world):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    sums = _opened(world)
    for turn in range(200):
        values = _values(turn, world.rank, 500)
        sums.add_up(values)
        assert torch.equal(values, _in_order(turn, world.size, 500))
    before = time.process_time()
    if world.rank == 0:
        time.sleep(2)
    sums.add_up(torch.ones(3))
    sums.close()
    return time.process_time() - before


def test_those_who_wait_leave_the_processors_to_others():
    """Four processes on two cores; while one is away for 2 s, the others compute nothing."""
    assert max(run_on_ranks(_crowded, 4)) < 1


def _add_up_for_ever(sums, rank, how, place):
    for turn in range(1_000_000):
        place.write_text(f"{turn} {time.monotonic()}")
        if rank == 1 and turn == 50:
            if how == "raises":
                sums.close()
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL if how == "is killed" else signal.SIGSTOP)
        sums.add_up(torch.ones(100))


def _until_one_ends(folder, rank, size, how):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    sums = _opened(World(rank, size, rank, size, "cpu", "gloo", 3.0 if how == "stops" else 0.0))
    place = folder / str(rank)
    with pytest.raises(RuntimeError) as raised:
        _add_up_for_ever(sums, rank, how, place)
    assert is_consequence(raised.value)
    with place.open("a") as file:
        file.write(f" {time.monotonic()} {raised.value}")
    with pytest.raises(RuntimeError, match="already released"):
        sums.add_up(torch.ones(100))


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("is killed", "remote process exited: rank 1"),
        ("raises", "remote process exited: rank 1"),
        ("stops", "Timed out waiting for rank 1"),
    ],
)
def test_a_process_that_ends_in_the_middle_is_heard_of(how, wanted, tmp_path):
    before = set(Path("/dev/shm").glob("*manyhands*"))
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_until_one_ends, args=(tmp_path, rank, 3, how)) for rank in range(3)]
    for child in children:
        child.start()
    for child in (children[0], children[2]):
        child.join(120)
    children[1].kill()
    children[1].join()
    assert (children[0].exitcode, children[2].exitcode) == (0, 0)
    ended = float((tmp_path / "1").read_text().split()[1])
    heard = [(tmp_path / str(rank)).read_text().split(" ", 3) for rank in (0, 2)]
    for turn, _, at, said in heard:
        # All hear it in the same sum; a silent one is given time, one that has gone none.
        assert int(turn) == 50
        assert wanted in said or "remote process exited" in said
        assert float(at) - ended < 30
    assert any(wanted in said for *_, said in heard)
    assert set(Path("/dev/shm").glob("*manyhands*")) <= before


def _network():
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 7)]
    network = nn.Sequential(*layers)
    network[0].to(memory_format=torch.channels_last)
    network[3].bias.data = network[3].bias.data.double()
    network.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    network.spare = nn.Parameter(torch.ones(4))
    return network


def _forward(network, pictures):
    hidden = network[2](network[1](network[0](pictures)))
    return hidden @ network[3].weight.T + network[3].bias.float()


def _gradients(world, slot_bytes):
    """Of two micro-batches in a row, of which one process alone uses `spare`; for two updates."""
    model = _network()
    sums = _opened(world, slot_bytes=slot_bytes)
    network = FlatNetwork(model, world, ModeTraits(), sums)
    found = []
    for update in range(2):
        model.zero_grad()
        for part in range(2):
            pictures = _values(10 * update + part, world.rank, 2 * 3 * 16).view(2, 3, 4, 4)
            loss = _forward(model, pictures).square().sum()
            (loss + model.spare.sum() if world.rank == 1 else loss).backward()
        flat = network.finish_gradients()
        direct = world.size == 2  # of the small tensors at least
        assert [one.dtype for one in flat] == ([] if direct else [torch.float32, torch.float64])
        assert model[0].weight.grad.stride() == model[0].weight.stride()
        found.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
    network.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("slot_bytes", [64, SLOT_BYTES])
def test_flat_gradients_are_those_of_one_process(slot_bytes, size):
    several = run_on_ranks(_gradients, size, slot_bytes)
    model = _network()
    for update in range(2):
        model.zero_grad()
        for part in range(2):
            for rank in range(size):
                pictures = _values(10 * update + part, rank, 2 * 3 * 16).view(2, 3, 4, 4)
                loss = _forward(model, pictures).square().sum()
                (loss + model.spare.sum() if rank == 1 else loss).backward()
        for found in several:
            for name, one in model.named_parameters():
                assert (one.grad is None) == (name not in found[update]), name
                if one.grad is not None:
                    torch.testing.assert_close(found[update][name], one.grad, rtol=1e-5, atol=1e-3)
                    assert torch.equal(found[update][name], several[0][update][name])


def _normalised(world, shared_memory):
    """Two updates of a network whose BatchNorm's only group lies on all processes; and how often gloo was asked."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 7))
    group_batch_norms(model)
    network = data.apply(model, world, ModeRequest(shared_memory=shared_memory))
    before, count = collectives_begun() - SharedSums.begun, 4 * world.size
    for update in range(2):
        model.zero_grad()
        shares = BatchSharing(world.size, 0, count).micro_batches(count)[0]
        mine = shares[world.rank]
        network.norms.begin_micro_batch(mine.spans, mine.shared_groups, mine.count, count)
        pictures = _values(update, world.rank, mine.count * 48).view(mine.count, 3, 4, 4)
        network.call(pictures).square().sum().backward()
        network.finish_gradients()
        network.finish_update()
    asked = collectives_begun() - SharedSums.begun - before
    assert copy.deepcopy(model)[1].groups.layers
    network.close()
    return asked, dict(model.named_buffers()), {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize("size", [2, 3])
def test_batch_norms_sums_go_through_memory_too(size):
    through, by_gloo = run_on_ranks(_normalised, size, True), run_on_ranks(_normalised, size, False)
    for (asked, buffers, gradients), (_, other_buffers, others) in zip(through, by_gloo, strict=True):
        assert asked == 0
        torch.testing.assert_close(buffers, other_buffers)
        torch.testing.assert_close(buffers, through[0][1], rtol=0, atol=0)
        # DDP gives the mean where memory gives the sum.
        wanted = {name: one * size for name, one in others.items()}
        torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(gradients, through[0][2], rtol=0, atol=0)


def _how(world, request, sparse=False):
    network = data.apply(nn.Embedding(4, 2, sparse=True) if sparse else _network(), world, request)
    network.close()
    return type(network), network.traits.averages


@pytest.mark.parametrize(
    ("request_", "sparse", "why"),
    [
        (ModeRequest(shared_memory=False), False, "parallel.shared_memory is false"),
        (ModeRequest(hook=bf16_compress_hook), False, "the sync method transforms"),
        (ModeRequest(unused=True), False, "some parameters get no gradient"),
        (ModeRequest(), True, "some gradients are sparse"),
    ],
)
def test_what_does_not_suit_goes_by_the_backend_and_says_why(request_, sparse, why):
    for kind, said in run_on_ranks(_how, 2, request_, sparse):
        assert kind is ParallelNetwork
        assert f"averaged by gloo: {why}" in said
