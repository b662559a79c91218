"""Laws of agreeing: nothing is lost, and all come to the same bits; test_resume has that they go on after a fault."""

import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyhands.core.errors import RunError
from manyhands.sync.compress import LIBRARY, PORTABLE, create_compressor, select_arithmetic
from manyhands.sync.costs import low_rank_layout, mean_bytes, value_bytes
from manyhands.sync.exchange import SyncGroup, average_vector, create_codec, run_exchange
from manyhands.sync.powersgd import PowerSgd
from manyhands.sync.synchronizer import Buffers, LocalGroup
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import assert_alike

NAMES = ("none", "bf16", "int8", "int4", "lowrank")
# Two are large enough to go as factors, two aren't.
SHAPES = [(64, 16, 3, 3), (40,), (90, 50), (7, 3)]
COUNT = sum(int(torch.Size(shape).numel()) for shape in SHAPES)
assert len(low_rank_layout(SHAPES, 2).matrices) == 2, "laws of low rank need tensors that go as factors"


def _own(world, *, seed=0, count=COUNT):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed * 100 + world.rank), dtype=torch.float64)


def _sum(tensor):
    total = tensor.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def _compressor(name, dtype=torch.float64):
    return create_compressor(name, SHAPES, rank=2, seed=3, device="cpu", dtype=dtype)


def _kept(world, own, sums):
    """What processes hold back of their own, and of the sums that each answers for."""
    kept = _sum(own) / world.size
    if sums is not None:
        whole = torch.zeros(sums.numel() * world.size, dtype=torch.float64)
        whole.view(world.size, -1)[world.rank] = sums
        kept = kept + _sum(whole)[: len(kept)]
    return kept


def _mean(world, name, count):
    peers, values = SyncGroup(world.rank, world.size), _own(world, count=count)
    mean, residual = run_exchange(average_vector(values, create_codec(name, torch.float64), peers))
    kept = _kept(world, residual.own, residual.sums)
    return mean, (mean + kept - _sum(values) / world.size).abs().sum().item(), peers.sent_bytes


def _of_all(world):
    """What each law's function returns for each of its cases, on these processes."""
    return [[function(world, *case) for case in cases] for function, cases in TRIED[world.size].items()]


@pytest.fixture(scope="module")
def on_ranks():
    """By number of processes and function: each case, with what all processes have returned for it."""

    @functools.cache
    def ran(size):
        ranks = run_on_ranks(_of_all, size)
        return {
            function: [(case, [found[place][number] for found in ranks]) for number, case in enumerate(cases)]
            for place, (function, cases) in enumerate(TRIED[size].items())
        }

    return lambda size, function: ran(size)[function]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_mean_and_what_was_kept_back_are_all_that_went_in(size, on_ranks):
    for (name, count), answers in on_ranks(size, _mean):
        for mean, lost, sent_bytes in answers:
            assert torch.equal(mean, answers[0][0])
            assert lost < 1e-10
            assert sent_bytes == mean_bytes(count, size, value_bytes(name, 8))


def _rounds(world, name):
    """Several exchanges: what went in so far is what came out and what is held."""
    compressor, peers = _compressor(name), SyncGroup(world.rank, world.size)
    residual, went_in, came_out = torch.zeros(COUNT, dtype=torch.float64), 0.0, 0.0
    for number in range(5):
        values = _own(world, seed=number)
        went_in = went_in + _sum(values) / world.size
        mean, residual = run_exchange(compressor.average(values + residual, peers))
        came_out = came_out + mean
    kept = _kept(world, residual, compressor.state().get("sums"))
    return mean, (came_out + kept - went_in).abs().max().item(), (came_out - went_in).norm().item()


def test_nothing_is_lost_over_several_exchanges(on_ranks):
    for (name,), answers in on_ranks(3, _rounds):
        for mean, lost, missing in answers:
            assert torch.equal(mean, answers[0][0])
            assert lost < 1e-10
            assert (missing < 1e-10) == (name == "none"), "this codec rounds, or it doesn't"


def _broken(world, name, value):
    """One value of one process is no number any more."""
    values = _own(world)
    if world.rank == 1:
        values[COUNT // 3] = value
    mean, _ = run_exchange(_compressor(name).average(values, SyncGroup(world.rank, world.size)))
    return bool(mean.isfinite().all())


def test_what_is_no_number_stays_none_on_all_processes(on_ranks):
    assert [case for case, finite in on_ranks(2, _broken) if any(finite)] == []


def _late(world, alike):
    """Nothing moves before the first exchange, some never moves; not `alike`: float32 stands for another processor."""
    shapes = [(64, 64), (40,)]
    compressor = create_compressor("lowrank", shapes, rank=2, seed=3, device="cpu", dtype=torch.float64)
    peers = SyncGroup(world.rank, world.size)
    like = torch.zeros(0, dtype=torch.float64 if alike or not world.rank else torch.float32)
    select_arithmetic([compressor], peers, like)
    assert (compressor.arithmetic is LIBRARY) == alike
    count = 64 * 64 + 40
    nothing, residual = run_exchange(compressor.average(torch.zeros(count, dtype=torch.float64), peers))
    values, missing = _own(world, count=count), []
    values[: 64 * 64].view(64, 64)[:16] = 0
    values[: 64 * 64].view(64, 64)[:, :16] = 0
    for _ in range(30):
        _, residual = run_exchange(compressor.average(values + residual, peers))
        values = torch.zeros_like(values)
        missing.append(_sum(residual).norm().item())
    return nothing.abs().max().item(), missing


def test_low_rank_forgets_no_direction_for_good(on_ranks):
    for _, answers in on_ranks(2, _late):
        for nothing, missing in answers:
            assert nothing == 0
            assert missing[-1] < missing[0] / 4, "what is held goes out in the end"


class _Deep(nn.Module):
    """Enough values for several batches of gradients; a layer that is used twice, and one that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self.conv = nn.Conv2d(32, 64, 3, padding=1).to(memory_format=torch.channels_last)
        self.unused = nn.Linear(128, 128)
        self.head = nn.Linear(128, 150)

    def forward(self, values):
        for layer in self.layers:
            values = layer(values).relu()
        values = self.layers[1](values) + self.conv(values.view(-1, 32, 2, 2)).reshape(-1, 256)[:, :128]
        return self.head(values)


def _gradients(network, world, step, *, passes=1):
    for parameter in network.parameters():
        parameter.grad = None
    for number in range(passes):
        values = _own(world, seed=10 * step + number, count=5 * 128).view(5, 128)
        yield number, network(values).square().mean()


def _machine(world):
    """Ranks 0 and 1 are one machine, rank 2 or 2 and 3 the other."""
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(2, world.size)))]
    leaders, place = dist.new_group([0, 2]), world.rank // 2
    size = 2 if place == 0 else world.size - 2
    return SyncGroup(place, 2, leaders), LocalGroup(groups[place], 2 * place, size, world.rank % 2 == 0)


def _power(world, beside, passes, machines=False):
    """What six updates send, and whether anything of what went in is lost."""
    network = _Deep().double()
    named = dict(network.named_parameters())
    rare = [one for name, one in named.items() if name.startswith("unused")]
    peers, machine = _machine(world) if machines else (SyncGroup(world.rank, world.size), None)
    power = PowerSgd(list(named.values()), peers, 16, 7, rare, machine=machine, processes=world.size)
    names, went_in, came_out = list(named), {}, {}
    for step in range(6):
        own = _Deep().double()
        for _, loss in _gradients(own, world, step, passes=passes):
            loss.backward()
        for name, one in own.named_parameters():
            if one.grad is not None:
                went_in[name] = went_in.get(name, 0) + _sum(one.grad) / world.size
        for number, loss in _gradients(network, world, step, passes=passes):
            if beside and number == passes - 1:
                power.before_last_micro_batch()
            loss.backward()
        power.on_gradients()
        for name, one in named.items():
            if one.grad is not None:
                came_out[name] = came_out.get(name, 0) + one.grad
    state, lost, missing = power.state()[0], 0.0, 0.0
    batches = sorted({key.partition(".")[0] for key in state if "." in key}, key=int)
    residual, names = torch.cat([state[f"{number}.held"] for number in batches]), names[::-1]
    residual = dict(zip(names, residual.split([named[name].numel() for name in names]), strict=True))
    for name in went_in:
        kept = (_sum(residual[name]) / world.size).view(named[name].shape)
        lost = max(lost, (came_out[name] + kept - went_in[name]).abs().max().item())
        missing = max(missing, kept.abs().max().item())
    power.close()
    return {name: one.clone() for name, one in came_out.items()}, len(batches), lost, missing


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_of_low_rank_are_equal_everywhere_and_nothing_is_lost(size, on_ranks):
    (_, answers), (_, waited_for) = on_ranks(size, _power)
    for came_out, batches, lost, missing in answers:
        assert batches > 2
        assert not any(name.startswith("unused") for name in came_out)
        assert_alike(came_out, answers[0][0])
        assert lost < 1e-10
        assert missing > 1e-6, "a low rank leaves something out"
    # Work that overlaps with the backward pass changes no bit.
    assert_alike(answers[0][0], waited_for[0][0])


OLDER = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
FACTORS = """
import hashlib, torch
from manyhands.sync.compress import LowRank, portable_product
thin, whole = LowRank([(64, 96)], 4, 1, "cpu"), torch.empty(64, 96)
portable_product(thin._known[0], torch.rand(len(thin._known[0]), 96, generator=torch.Generator().manual_seed(1)), whole)
parts = [thin._first[0][0], thin._first[1][0], thin._known[0], whole]
print(*(hashlib.sha256(part.contiguous().numpy().tobytes()).hexdigest() for part in parts))
"""


def _replaced(world, replaces):
    """A gradient that a user's hook doubles, in its place or with another tensor."""
    layer = nn.Linear(96, 96).double()
    with torch.no_grad():
        layer.weight.fill_(0.5)
        layer.bias.zero_()

    def double(parameter):
        if replaces:
            parameter.grad = parameter.grad * 2
        else:
            parameter.grad.mul_(2)

    layer.weight.register_post_accumulate_grad_hook(double)
    power = PowerSgd(list(layer.parameters()), SyncGroup(world.rank, world.size), 2, 7)
    seen = []
    for step in range(4):
        layer.zero_grad()
        power.before_last_micro_batch()
        layer(_own(world, seed=step, count=96)).square().sum().backward()
        power.on_gradients()
        seen.append(layer.weight.grad.clone())
    state, _ = power.state()
    power.close()
    return torch.stack(seen), next(residual for name, residual in state.items() if name.endswith("held"))


def test_a_hook_may_put_another_tensor_in_the_place_of_a_gradient(on_ranks):
    (_, replaced), (_, written) = on_ranks(2, _replaced)
    for (one, residual), (other, also) in zip(replaced, written, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(residual, also)


@pytest.mark.parametrize("arithmetic", [LIBRARY, PORTABLE])
def test_orthonormal_columns_span_what_the_factor_does(arithmetic):
    generator = torch.Generator().manual_seed(2)
    factors = [torch.randn(rank, length, generator=generator) for rank, length in ((1, 5), (4, 300), (16, 64), (7, 64))]
    factors[2][5] = 3 * factors[2][1]  # explained by another one
    factors[3][4] = 0  # has come to nothing
    first = [torch.eye(*factor.shape) for factor in factors]
    for factor, found in zip(factors, arithmetic.orthonormal(factors, first), strict=True):
        products = found @ found.T
        assert torch.allclose(products, torch.diag(products.diagonal().round()), atol=1e-5)
        assert torch.allclose(factor @ found.T @ found, factor, atol=1e-4)


@pytest.mark.slow
def test_factors_and_their_products_are_equal_on_other_processors():
    """torch does as an older processor does if it is told so; on one that knows no other way nothing is proven."""
    said = [
        subprocess.run([sys.executable, "-c", FACTORS], env=env, capture_output=True, text=True, check=True).stdout
        for env in (dict(os.environ), {**os.environ, **OLDER})
    ]
    assert said[0].split() == said[1].split()


def _averaged(world):
    counted = torch.tensor(2**24 + 1 + world.rank)
    running = torch.full((3,), world.rank + 2.0**-40, dtype=torch.float64)
    buffers = Buffers([counted, running], SyncGroup(world.rank, world.size))
    buffers.average(1)
    buffers.write(buffers.averaged)
    return int(counted), running.tolist()


def test_mean_of_statistics_leaves_integers_alone_and_is_of_64_bits(on_ranks):
    ((_, answers),) = on_ranks(2, _averaged)
    assert answers == [(2**24 + 1 + rank, [0.5 + 2.0**-40] * 3) for rank in range(2)]


def test_a_gradient_that_comes_twice_in_a_pass_is_refused():
    layer = nn.Linear(64, 64)
    power = PowerSgd(list(layer.parameters()), SyncGroup(), 1, 0)
    values = torch.zeros(2, 64, requires_grad=True)
    for _ in range(2):
        values = checkpoint(layer, values, use_reentrant=True)
    power.before_last_micro_batch()
    with pytest.raises(RunError, match="twice"):
        values.sum().backward()
    power.close()


COUNTS = [(name, count) for name in NAMES[:4] for count in (0, 1, 255, 1000)]
# By number of processes, what each law is tried with.
TRIED = {
    1: {_mean: COUNTS, _power: [(beside, 1, False) for beside in (True, False)]},
    2: {
        _mean: COUNTS,
        _broken: [(name, value) for name in NAMES for value in (float("inf"), float("-inf"), float("nan"))],
        _late: [(False,), (True,)],
        _power: [(beside, 3, False) for beside in (True, False)],
        _replaced: [(True,), (False,)],
        _averaged: [()],
    },
    3: {_mean: COUNTS, _rounds: [(name,) for name in NAMES], _power: [(beside, 3, True) for beside in (True, False)]},
}
