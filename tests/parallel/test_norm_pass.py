"""Several groups of BatchNorm through one pass are what torch's kernel makes of each of them, as on an accelerator."""

import copy

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.core.errors import UserError
from manyhands.data.order import BatchSharing
from manyhands.parallel.replicas import batch_norm as norm
from manyhands.parallel.replicas.batch_norm import group_batch_norms

KINDS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
# What rounding leaves, relative to each tensor's largest value.
ROUNDING = {torch.float32: 3e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


@pytest.fixture
def one_pass(monkeypatch):
    """Has this processor take the way of a tested accelerator."""
    monkeypatch.setattr(norm, "is_tested", lambda device: True)


class Calls(TorchDispatchMode):
    """Counts torch's own kernels, all operations, and what would wait for a card."""

    def __init__(self):
        super().__init__()
        self.kernels = self.all = 0
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.all += 1
        self.kernels += name in {"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"}
        if name in {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "lift_fresh", "_to_copy"} and (
            name != "_to_copy" or (kwargs or {}).get("device")
        ):
            self.waits.append(name)
        return function(*args, **(kwargs or {}))


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
    if groups.layers[0].seen is not None:
        found["seen"] = groups.layers[0].seen
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert output.dtype == images.dtype == images.grad.dtype
    return found, calls


def both(layer, images, group, slope, rows=1):
    """The same by each group alone, and in one pass."""
    alone, calls = trained(layer, images, group, slope, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "is_tested", lambda device: True)
        together, fewer = trained(layer, images, group, slope, rows)
    return alone, together, calls, fewer


def steepest(images, group, rows, eps=1e-5):
    """What a deviation from a group's mean is multiplied by at most."""
    spans = BatchSharing(1, 0, group).micro_batches(len(images) // rows)[0][0].spans
    parts = [images[span.start * rows : span.stop * rows].double().transpose(0, 1).flatten(1) for span in spans]
    return max(float((part.var(1, correction=0) + eps).rsqrt().max()) for part in parts)


def assert_alike(got, wanted, most):
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = max(float(tensor.abs().max()), 1.0)
        worst = float((got[name].double() - tensor.double()).abs().max()) / scale
        assert worst <= most, (name, worst)


def assert_as_if_rounded_once_more(got, wanted, images, group, rows):
    """Differs by what follows from another rounding of the input: all but statistics by how steep groups are."""
    assert_alike({"seen": got.pop("seen", images)}, {"seen": wanted.pop("seen", images)}, 1e-12)
    moved = float(images.abs().max()) * steepest(images, group, rows)
    for name, tensor in wanted.items():
        factor = steepest(images, group, rows) if name == "input" else 1.0
        assert_alike({name: got[name]}, {name: tensor}, 1e-13 * max(10.0, moved * factor))


@st.composite
def cases(draw):
    dims = draw(st.integers(0, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    rows = draw(st.integers(1, 3)) if dims == 0 else 1
    last = draw(st.booleans())
    return {
        "dims": dims, "count": draw(st.integers(2, 23)), "channels": draw(st.integers(1, 5)), "shape": shape,
        "group": draw(st.integers(1, 9)), "rows": rows, "last": last, "affine": draw(st.booleans()),
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


@given(cases())
@example({"dims": 2, "count": 16, "channels": 3, "shape": [2, 2], "group": 4, "rows": 1, "last": True, "affine": True,
          "seed": 0, "mean": 5.0})  # fmt: skip
@example({"dims": 2, "count": 21, "channels": 2, "shape": [2, 2], "group": 4, "rows": 1, "last": True, "affine": False,
          "seed": 0, "mean": 0.0})  # fmt: skip
@example({"dims": 0, "count": 23, "channels": 3, "shape": [], "group": 4, "rows": 3, "last": False, "affine": False,
          "seed": 0, "mean": 0.0})  # fmt: skip
def test_in_one_pass_groups_become_what_each_becomes_alone(case):
    layer, images, slope = made(case, torch.float64)
    alone, together, _, _ = both(layer, images, case["group"], slope, case["rows"])
    strides = together["output"].stride(), alone["output"].stride()
    assert_as_if_rounded_once_more(together, alone, images, case["group"], case["rows"])
    # With a dimension of one element the strides don't say which layout it is.
    assert strides[0] == strides[1] or not case["last"] or 1 in case["shape"]


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_other_precisions_differ_by_rounding_alone(case, dtype):
    # Of few values the variance may be next to nothing, and then every rounding counts.
    case |= {"group": max(4, case["group"]), "count": max(8, case["count"])}
    layer, images, slope = made(case, dtype)
    exact, _ = trained(copy.deepcopy(layer).double(), images.double(), case["group"], slope.double(), case["rows"])
    _, together, _, _ = both(layer, images, case["group"], slope, case["rows"])
    assert_alike(together, exact, ROUNDING[dtype])


def test_the_pass_is_taken_and_costs_fewer_operations():
    layer, images, slope = nn.BatchNorm2d(4).train(), torch.randn(32, 4, 3, 3), torch.randn(32, 4, 3, 3)
    _, _, each, once = both(layer, images, 2, slope)
    assert each.kernels == 16
    assert once.kernels == 0
    assert once.all < each.all / 3


@pytest.mark.parametrize(
    ("count", "group", "kernels"),
    [
        (100, 16, 4),  # 14, 14, 14, 15, 14, 14, 15: the first three in one pass, since a run of two isn't worth one
        (60, 8, 8),  # 7, 8, 7, 8, 7, 8, 7, 8
    ],
)
def test_neighboring_groups_of_one_size_are_one_pass(count, group, kernels):
    layer, images, slope = nn.BatchNorm1d(4).train().double(), torch.randn(count, 4).double(), torch.randn(count, 4)
    alone, together, _, once = both(layer, images, group, slope.double())
    assert once.kernels == kernels
    assert_alike(together, alone, 1e-12)


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize(("count", "group"), [(12, 3), (60, 8)])
def test_nothing_in_a_pass_waits_for_the_card(count, group):
    layer, images, slope = nn.BatchNorm2d(4).train(), torch.randn(count, 4, 3, 3), torch.randn(count, 4, 3, 3)
    trained(layer, images, group, slope)  # what is kept is made
    assert trained(layer, images, group, slope)[1].waits == []


@pytest.mark.usefixtures("one_pass")
def test_a_group_of_one_value_uses_what_is_known_so_far():
    layer = nn.BatchNorm1d(3).train().double()
    layer.running_mean.fill_(2)
    layer.running_var.fill_(4)
    images = torch.randn(5, 3).double()
    found, _ = trained(layer, images, 1, torch.ones(5, 3).double())
    torch.testing.assert_close(found["output"], (images - 2) / (4 + layer.eps) ** 0.5)
    assert "seen" not in found


@pytest.mark.usefixtures("one_pass")
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
    with Calls() as calls:
        normalized(images, *parameters)
    assert calls.kernels == 0
    assert torch.autograd.gradcheck(normalized, (images, *parameters))
    assert torch.autograd.gradgradcheck(normalized, (images, *parameters))


@pytest.mark.usefixtures("one_pass")
def test_frozen_parameters_and_an_input_without_gradient_get_none():
    layer = nn.BatchNorm1d(3).train()
    layer.weight.requires_grad_(False)
    grouped(layer, 12, 4)
    layer(torch.randn(12, 3)).sin().sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_output_has_the_inputs_type(dtype):
    layer = nn.BatchNorm2d(3).train()
    images, slope = torch.randn(12, 3, 4, 4).to(dtype), torch.randn(12, 3, 4, 4).to(dtype)
    with torch.autocast("cpu", dtype):
        alone, together, _, once = both(layer, images, 4, slope)
    assert once.kernels == 0
    assert_alike(together, alone, 2 * ROUNDING[dtype])


@pytest.mark.usefixtures("one_pass")
def test_a_class_of_somebodys_own_goes_through_the_pass_too():
    batch_norm_act = pytest.importorskip("timm.layers").BatchNormAct2d
    layer, images, slope = batch_norm_act(4).train().double(), torch.randn(12, 4, 2, 2), torch.randn(12, 4, 2, 2)
    alone, together, _, once = both(layer, images.double(), 4, slope.double())
    assert once.kernels == 0
    assert_alike(together, alone, 1e-12)


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_move_as_by_torchs_own_layer_and_stay_where_nothing_was_seen(momentum):
    torch.manual_seed(0)
    ours, theirs = (nn.BatchNorm1d(3, momentum=momentum).double().train() for _ in range(2))
    groups, _ = group_batch_norms(ours)
    share = BatchSharing(1, 0, 4).micro_batches(12)[0][0]
    for _ in range(3):
        images = torch.randn(12, 3).double()
        before = [buffer.clone() for buffer in theirs.buffers()]
        moved = []
        for part in images.split(4):
            for buffer, value in zip(theirs.buffers(), before, strict=True):
                buffer.copy_(value)
            theirs(part)
            moved.append([buffer.clone() for buffer in theirs.buffers()])
        for buffer, values in zip(theirs.buffers(), zip(*moved, strict=True), strict=True):
            buffer.copy_(torch.stack([value.double() for value in values]).mean(0))
        groups.begin_micro_batch(share.spans, share.shared_groups, 12, 12)
        ours(images)
        groups.finish_update(1)
        groups.finish_update(1)
        for name, buffer in theirs.named_buffers():
            torch.testing.assert_close(dict(ours.named_buffers())[name], buffer, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize(("count", "group"), [(16, 4), (60, 8)])
def test_compiled_it_is_the_same(count, group):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True)).train()
    images, slope = torch.randn(count, 4, 5, 5), torch.randn(count, 4, 5, 5)
    found = []
    for compiles in (False, True):
        model, values = copy.deepcopy(layer), images.clone().requires_grad_()
        groups = grouped(model, count, group)
        if compiles:
            model.compile(dynamic=False, fullgraph=True)
        output = model(values)
        output.backward(slope)
        found.append({"output": output.detach(), "input": values.grad, "weight": model[0].weight.grad,
                      "bias": model[0].bias.grad, "seen": groups.layers[0].seen})  # fmt: skip
    assert_alike(found[1], found[0], 1e-5)


@pytest.mark.usefixtures("one_pass")
def test_what_comes_behind_may_change_the_output_in_place():
    torch.manual_seed(0)
    layer, images, slope = nn.BatchNorm2d(4).train().double(), torch.randn(12, 4, 2, 2), torch.randn(12, 4, 2, 2)
    found = []
    for inplace in (False, True):
        model = nn.Sequential(copy.deepcopy(layer), nn.ReLU(inplace=inplace))
        grouped(model, 12, 4)
        values = images.double().requires_grad_()
        model(values).backward(slope.double())
        found.append(values.grad)
    assert torch.equal(*found)


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("rows", [99, 101, 103])
def test_rows_that_are_not_the_samples_are_refused(rows):
    layer = nn.BatchNorm1d(4).train()
    grouped(layer, 100, 7)
    with pytest.raises(UserError, match=f"has {rows} rows"):
        layer(torch.randn(rows, 4))


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
