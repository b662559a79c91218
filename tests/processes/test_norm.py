"""BatchNorm over fixed groups is the same at any number of processes, equals torch's own, and goes through one pass.

On an accelerator several groups go through one pass; here processors take that way where `in_one_pass` says so.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.data.order import BatchSharing
from manyhands.parallel.replicas import batch_norm as norm
from manyhands.parallel.replicas.batch_norm import group_batch_norms, record_inputs, set_rows_per_sample
from tests.processes.updates import assert_alike, by_case

KINDS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
# What rounding leaves, relative to each tensor's largest value.
ROUNDING = {torch.float32: 3e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


@contextlib.contextmanager
def in_one_pass(takes=True):
    """Has this processor take the way of a tested accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "is_tested_accelerator", lambda device: takes)
        yield


class Flattened(nn.Module):
    """Normalizes tokens [samples, C, H, W] as rows [samples x H x W, C], or as [H x W x samples, C] (`mixed`)."""

    mixed = False

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, images):
        order = (2, 3, 0, 1) if self.mixed else (0, 2, 3, 1)
        tokens = images.permute(order)
        rows = self.norm(tokens.flatten(0, 2)).view(tokens.shape)
        return rows.permute([order.index(place) for place in range(4)])


class Activated(nn.BatchNorm2d):
    """A class of somebody's own, which normalizes and does more."""

    def forward(self, images):
        return torch.tanh(super().forward(images))


class ByHand(nn.BatchNorm2d):
    def forward(self, images):
        return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)


def _network():
    """What comes behind a layer may change its output in place."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), Activated(4), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 3), Flattened(3)
    )


def _pass(world, count, group, micro, once):
    with in_one_pass(once):
        return _gradients(world, count, group, micro)


def _gradients(world, count, group, micro):
    model = _network().double().train()
    groups, _ = group_batch_norms(model)
    images = torch.randn(count, 2, 8, 8, dtype=torch.float64)
    with record_inputs(groups.layers) as seen:
        model(images[:2])
    set_rows_per_sample(model, seen, images[:2])
    assert [layer.rows_per_sample for layer in groups.layers] == [1, 1, 16 if count > 1 else 0]
    groups.layers[2].rows_per_sample = 16
    for layer in groups.layers:
        layer.accumulated = None
    for shares in BatchSharing(world.size, micro, group).micro_batches(count):
        share = shares[world.rank]
        groups.begin_micro_batch(share.spans, share.shared_groups, share.count, count)
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


# By number of processes: samples, of a group, of a micro-batch (0: all), and whether a pass takes several groups; with
# 3 processes some groups are whole on one, and others shared.
PASSES = {
    2: [(37, 8, 0, False), (1, 4, 0, False), (37, 3, 0, True)],
    3: [(20, 64, 0, False), (40, 8, 6, False), (40, 4, 0, True)],
    4: [(3, 2, 0, False), (33, 16, 4, False)],
}


@pytest.mark.parametrize("size", PASSES)
def test_same_gradients_and_statistics_at_any_number_of_processes(size):
    for (count, group, *_), found in zip(PASSES[size], by_case(size, _pass, PASSES[size]), strict=True):
        alone = _gradients(World(), count, group, 0)
        torch.testing.assert_close(found, (alone,) * size, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [Activated, nn.BatchNorm2d])
def test_one_group_is_torchs_own_batch_norm_or_that_of_somebodys_own_class(kind):
    torch.manual_seed(0)
    alone = kind(3).double().train()
    ours = copy.deepcopy(alone)
    groups, restore = group_batch_norms(ours)
    share = BatchSharing(1, 0, 8).micro_batches(8)[0][0]
    groups.begin_micro_batch(share.spans, share.shared_groups, 8, 8)
    images = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    outputs = [layer(images) for layer in (alone, ours)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.sin().sum().backward()
    groups.finish_update(1)
    torch.testing.assert_close(ours.weight.grad, alone.weight.grad)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(alone.named_buffers()))
    torch.testing.assert_close(ours.eval()(images), alone.eval()(images))
    restore()
    assert type(ours) is kind


def test_a_class_that_normalizes_by_itself_and_rows_that_are_not_the_samples_are_refused():
    layer = ByHand(3).train()
    groups, _ = group_batch_norms(layer)
    groups.begin_micro_batch((), (), 8, 8)
    with pytest.raises(UserError, match="ByHand is a subclass of BatchNorm"):
        layer(torch.randn(8, 3, 4, 4))
    layer = nn.BatchNorm1d(4).train()
    grouped(layer, 100, 7)
    with in_one_pass(), pytest.raises(UserError, match="has 101 rows"):
        layer(torch.randn(101, 4))


def test_rows_whose_samples_are_not_known_are_normalized_where_they_are():
    model = _network().train()
    model[5].mixed = True
    groups, _ = group_batch_norms(model)
    images = torch.randn(6, 2, 8, 8)
    with record_inputs(groups.layers) as seen:
        model(images)
    set_rows_per_sample(model, seen, images)
    assert [layer.rows_per_sample for layer in groups.layers] == [1, 1, 0]
    share = BatchSharing(1, 0, 2).micro_batches(6)[0][0]
    groups.begin_micro_batch(share.spans, share.shared_groups, 6, 6)
    assert model(images).shape == (6, 3, 4, 4)


class Calls(TorchDispatchMode):
    """Counts torch's own kernels, all operations, values in double precision, and what would wait for a card."""

    def __init__(self):
        super().__init__()
        self.kernels = self.all = self.doubles = 0
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.all += 1
        self.kernels += name in {"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"}
        if name in {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "lift_fresh", "_to_copy"} and (
            name != "_to_copy" or (kwargs or {}).get("device")
        ):
            self.waits.append(name)
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor) and one.dtype == torch.float64:
                self.doubles = max(self.doubles, one.numel())
        return result


def _single_precision(world, dtype, mean):
    """The largest error of output and gradients beside double precision's, and the largest dtype that was stored."""
    case = {
        **PLAIN,
        "channels": 8,
        "shape": [6, 6],
        "count": 16,
        "affine": True,
        "mean": mean,
        "seed": 2,
        "last": False,
    }
    layer, images, slope = made(case, dtype)
    exact, _ = trained(copy.deepcopy(layer).double(), images.double(), 16, slope.double())
    groups, _ = group_batch_norms(layer)
    share = BatchSharing(2, 0, 16).micro_batches(16)[0][world.rank]
    groups.begin_micro_batch(share.spans, share.shared_groups, share.count, 16)
    mine = slice(share.start, share.stop)
    own = images[mine].requires_grad_()
    with Calls() as calls:
        output = layer(own)
        output.backward(slope[mine])
    apart = output.detach().double() - exact["output"][mine]
    gradient = own.grad.double() - exact["input"][mine]
    return [float(one.abs().max()) for one in (apart.mean((0, 2, 3)), apart, gradient)], calls.doubles


def test_shared_groups_are_as_exact_as_what_they_are_given():
    answers = by_case(2, _single_precision, [(torch.bfloat16, 3.0), (torch.float16, 3.0), (torch.float32, 1000.0)])
    for of_ranks, bias, error in zip(answers, (0.002, 0.0003, 1e-6), (0.02, 0.002, 1e-5), strict=True):
        for found, doubles in of_ranks:
            assert all(one < most for one, most in zip(found, (bias, error, error), strict=True))
            assert doubles <= 16 * 8  # values per channel and per sample, nothing as large as the activation


def grouped(layer, count, group, rows=1):
    """The groups of the layers in a network, of a micro-batch of `count` samples on one process."""
    groups, _ = group_batch_norms(layer)
    for one in groups.layers:
        one.rows_per_sample = rows
    share = BatchSharing(1, 0, group).micro_batches(count)[0][0]
    groups.begin_micro_batch(share.spans, share.shared_groups, count, count)
    return groups


def trained(layer, images, group, slope, rows=1):
    """Output, gradients and what was seen, of a copy of the layer; and the calls that it made."""
    layer, images = copy.deepcopy(layer), images.clone(memory_format=torch.preserve_format).requires_grad_()
    groups = grouped(layer, len(images) // rows, group, rows)
    with Calls() as calls:
        output = layer(images)
        output.backward(slope)
    found = {"output": output.detach(), "input": images.grad}
    if groups.layers[0].accumulated is not None:
        found["seen"] = groups.layers[0].accumulated
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert output.dtype == images.dtype == images.grad.dtype
    return found, calls


def both(layer, images, group, slope, rows=1):
    """The same by each group alone, and in one pass."""
    with in_one_pass():
        together = trained(layer, images, group, slope, rows)
    return (*zip(trained(layer, images, group, slope, rows), together, strict=True),)


def steepest(images, group, rows, eps=1e-5):
    """What a deviation from a group's mean is multiplied by at most."""
    spans = BatchSharing(1, 0, group).micro_batches(len(images) // rows)[0][0].spans
    parts = [images[span.start * rows : span.stop * rows].double().transpose(0, 1).flatten(1) for span in spans]
    return max(float((part.var(1, correction=0) + eps).rsqrt().max()) for part in parts)


@st.composite
def cases(draw):
    dims = draw(st.integers(0, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    rows = draw(st.integers(1, 3)) if dims == 0 else 1
    return {
        "dims": dims, "count": draw(st.integers(2, 23)), "channels": draw(st.integers(1, 5)), "shape": shape,
        "group": draw(st.integers(1, 9)), "rows": rows, "last": draw(st.booleans()), "affine": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)), "mean": draw(st.sampled_from([0.0, 5.0])),
    }  # fmt: skip


def made(case, dtype):
    torch.manual_seed(case["seed"])
    layer = KINDS[case["dims"]](case["channels"], affine=case["affine"]).train()
    layer = layer.double() if dtype == torch.float64 else layer
    if case["affine"]:
        with torch.no_grad():
            layer.weight.uniform_(-1.5, 1.5)
            layer.bias.uniform_(-1, 1)
    shape = case["count"] * case["rows"], case["channels"], *case["shape"]
    images, slope = torch.randn(shape, dtype=torch.float64) + case["mean"], torch.randn(shape, dtype=torch.float64)
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}.get(case["dims"])
    if case["last"] and layout:
        images = images.contiguous(memory_format=layout)
    return layer, images.to(dtype), slope.to(dtype)


PLAIN = {"dims": 2, "channels": 3, "shape": [2, 2], "group": 4, "rows": 1, "last": True, "seed": 0}


@given(cases())
@example({**PLAIN, "count": 16, "affine": True, "mean": 5.0})
@example({**PLAIN, "count": 21, "affine": False, "mean": 0.0})
@example({**PLAIN, "dims": 0, "count": 23, "shape": [], "rows": 3, "affine": False, "mean": 0.0})
def test_in_one_pass_groups_become_what_each_becomes_alone(case):
    """Differs by what follows from another rounding of the input: all but statistics by how steep groups are."""
    layer, images, slope = made(case, torch.float64)
    (alone, together), _ = both(layer, images, case["group"], slope, case["rows"])
    # With a dimension of one element the strides don't say which layout it is.
    strides = together["output"].stride(), alone["output"].stride()
    assert strides[0] == strides[1] or not case["last"] or 1 in case["shape"]
    assert together.keys() == alone.keys()
    steep = steepest(images, case["group"], case["rows"])
    moved = float(images.abs().max()) * steep
    for name, tensor in alone.items():
        most = 1e-12 if name == "seen" else 1e-13 * max(10.0, moved * (steep if name == "input" else 1.0))
        assert_alike(together, {name: tensor}, most, least=1.0)


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_other_precisions_differ_by_rounding_alone(case, dtype):
    # Of few values the variance may be next to nothing, and then every rounding counts.
    case |= {"group": max(4, case["group"]), "count": max(8, case["count"])}
    layer, images, slope = made(case, dtype)
    exact, _ = trained(copy.deepcopy(layer).double(), images.double(), case["group"], slope.double(), case["rows"])
    (alone, together), _ = both(layer, images, case["group"], slope, case["rows"])
    for name, one in exact.items():
        apart = float((alone[name] - one).abs().max())  # torch's layer rounds as much where values are almost equal
        least = max(1.0, 5 * apart / ROUNDING[dtype])
        assert_alike({name: together[name].double()}, {name: one}, ROUNDING[dtype], least=least)


@pytest.mark.parametrize(
    ("count", "group", "kernels"),
    [
        (32, 2, 0),
        (100, 16, 4),  # 14, 14, 14, 15, 14, 14, 15: the first three in one pass, since a run of two isn't worth one
        (60, 8, 8),  # 7, 8, 7, 8, 7, 8, 7, 8
    ],
)
def test_neighboring_groups_of_one_size_are_one_pass_that_costs_fewer_operations_and_waits_for_no_card(
    count, group, kernels
):
    layer = nn.BatchNorm2d(4).train().double()
    images, slope = torch.randn(2, count, 4, 3, 3).double()
    (alone, together), (each, _) = both(layer, images, group, slope)
    with in_one_pass():
        _, once = trained(layer, images, group, slope)  # what is kept is made
    assert once.kernels == kernels
    assert once.all < each.all / 3 or kernels
    assert once.waits == []
    assert_alike(together, alone, 1e-12, least=1.0)


def test_a_group_of_one_value_uses_what_is_known_so_far():
    layer = nn.BatchNorm1d(3).train().double()
    layer.running_mean.fill_(2)
    layer.running_var.fill_(4)
    images = torch.randn(5, 3).double()
    with in_one_pass():
        found, _ = trained(layer, images, 1, torch.ones(5, 3).double())
    torch.testing.assert_close(found["output"], (images - 2) / (4 + layer.eps) ** 0.5)
    assert "seen" not in found


@pytest.mark.parametrize("affine", [True, False])
def test_gradients_and_their_gradients_are_those_of_the_function(affine):
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(2, affine=affine).double().train()
    groups, _ = group_batch_norms(layer)
    share = BatchSharing(1, 0, 3).micro_batches(9)[0][0]
    parameters = list(layer.parameters())

    def normalized(images, *values):
        groups.begin_micro_batch(share.spans, share.shared_groups, 9, 9)
        return torch.func.functional_call(layer, dict(zip(("weight", "bias"), values, strict=False)), (images,))

    images = torch.randn(9, 2, 2, 1, dtype=torch.float64, requires_grad=True)
    with in_one_pass():
        with Calls() as calls:
            normalized(images, *parameters)
        assert calls.kernels == 0
        assert torch.autograd.gradcheck(normalized, (images, *parameters))
        assert torch.autograd.gradgradcheck(normalized, (images, *parameters))
        for parameter in parameters[:1]:
            parameter.requires_grad_(False)
            normalized(images.detach(), *parameters).sin().sum().backward()
            assert [one.grad is None for one in parameters] == [True, False]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_move_as_by_torchs_own_layer_and_stay_where_nothing_was_seen(momentum):
    torch.manual_seed(0)
    ours, theirs = (nn.BatchNorm1d(3, momentum=momentum).double().train() for _ in range(2))
    groups, _ = group_batch_norms(ours)
    share = BatchSharing(1, 0, 4).micro_batches(12)[0][0]
    for _ in range(3):
        images = torch.randn(12, 3).double()
        of_groups = [copy.deepcopy(theirs) for _ in range(3)]
        for layer, part in zip(of_groups, images.split(4), strict=True):
            layer(part)
        for buffer, *moved in zip(theirs.buffers(), *(layer.buffers() for layer in of_groups), strict=True):
            buffer.copy_(torch.stack(moved).double().mean(0))
        groups.begin_micro_batch(share.spans, share.shared_groups, 12, 12)
        with in_one_pass():
            ours(images)
        groups.finish_update(1)
        groups.finish_update(1)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "group"), [(16, 4), (60, 8)])
def test_compiled_it_is_the_same(count, group):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True)).train()
    images, slope = torch.randn(2, count, 4, 5, 5)
    with in_one_pass():
        plain, _ = trained(layer, images, group, slope)
        model, values = copy.deepcopy(layer), images.clone().requires_grad_()
        groups = grouped(model, count, group)
        model.compile(dynamic=False, fullgraph=True)
        output = model(values)
        output.backward(slope)
    found = {"output": output.detach(), "input": values.grad, "seen": groups.layers[0].accumulated}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_alike(found, plain, 1e-5, least=1.0)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_plain_mean_of_many_updates_in_half_precision_still_moves(kind):
    layer = nn.BatchNorm1d(2, momentum=None).train()
    groups, _ = group_batch_norms(layer)
    layer.running_mean = torch.zeros(2, dtype=kind)
    layer.num_batches_tracked.fill_(70_000)
    groups.begin_micro_batch((), (), 4, 4)
    layer.normalize(torch.full((4, 2), 60_000.0))
    groups.finish_update(1)
    assert (layer.running_mean > 0).all()
