"""BatchNorm over fixed groups is the same at any number of processes, and equals torch's own for one group."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.data.order import BatchSharing
from manyhands.parallel.replicas import batch_norm as norm
from manyhands.parallel.replicas.batch_norm import group_batch_norms, set_rows_per_sample, watching
from tests.processes.ranks import run_on_ranks


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
        return torch.relu(super().forward(images))


class ByHand(nn.BatchNorm2d):
    def forward(self, images):
        return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)


def _network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3), Activated(4), nn.Identity(), nn.Conv2d(4, 3, 3), Flattened(3))


def _pass(world, count, group, micro):
    model = _network().double().train()
    groups, _ = group_batch_norms(model)
    images = torch.randn(count, 2, 8, 8, dtype=torch.float64)
    with watching(groups.layers) as seen:
        model(images[:2])
    set_rows_per_sample(model, seen, images[:2])
    assert [layer.rows_per_sample for layer in groups.layers] == [1, 16 if count > 1 else 0]
    groups.layers[1].rows_per_sample = 16
    for layer in groups.layers:
        layer.seen = None
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


# By number of processes: samples, of a group, and of a micro-batch (0: all).
PASSES = {
    2: [(37, 8, 0), (1, 4, 0)],
    3: [(20, 64, 0), (40, 8, 6)],
    4: [(3, 2, 0), (33, 16, 4)],
}
# As on an accelerator a pass takes several groups; with 3 processes some are whole on one, and others shared.
IN_ONE_PASS = {2: [(37, 3, 0)], 3: [(40, 4, 0)]}


def _passes(world, cases):
    return [_pass(world, *case) for case in cases]


@pytest.mark.parametrize(
    ("several", "size"), [(cases is IN_ONE_PASS, n) for cases in (PASSES, IN_ONE_PASS) for n in cases]
)
def test_same_gradients_and_statistics_at_any_number_of_processes(several, size, monkeypatch):
    cases = (IN_ONE_PASS if several else PASSES)[size]
    alone = [_pass(World(), count, group, 0) for count, group, _ in cases]
    if several:
        monkeypatch.setattr(norm, "is_tested", lambda device: True)
    for found in run_on_ranks(_passes, size, cases):
        for (gradients, buffers), (wanted, wanted_buffers) in zip(found, alone, strict=True):
            torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(buffers, wanted_buffers, rtol=1e-10, atol=1e-12)


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
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], buffer)
    torch.testing.assert_close(ours.eval()(images), alone.eval()(images))
    assert int(ours.num_batches_tracked) == 1
    restore()
    assert type(ours) is kind


def test_a_class_that_normalizes_by_itself_is_named():
    layer = ByHand(3).train()
    groups, _ = group_batch_norms(layer)
    groups.begin_micro_batch((), (), 8, 8)
    with pytest.raises(UserError, match="ByHand is a subclass of BatchNorm"):
        layer(torch.randn(8, 3, 4, 4))


def test_rows_whose_samples_are_not_known_are_normalized_where_they_are():
    model = _network().train()
    model[4].mixed = True
    groups, _ = group_batch_norms(model)
    images = torch.randn(6, 2, 8, 8)
    with watching(groups.layers) as seen:
        model(images)
    set_rows_per_sample(model, seen, images)
    assert [layer.rows_per_sample for layer in groups.layers] == [1, 0]
    share = BatchSharing(1, 0, 2).micro_batches(6)[0][0]
    groups.begin_micro_batch(share.spans, share.shared_groups, 6, 6)
    assert model(images).shape == (6, 3, 4, 4)


def _single_precision(world, dtype, mean):
    """The largest error of output and gradients beside double precision's, and the largest dtype that was stored."""
    torch.manual_seed(2)
    images = (torch.randn(16, 8, 6, 6, dtype=torch.float64) + mean).to(dtype).double()
    slope = torch.randn(16, 8, 6, 6, dtype=torch.float64).to(dtype).double()
    layer, exact = nn.BatchNorm2d(8), nn.BatchNorm2d(8).double()
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2)
        layer.bias.uniform_(-1, 1)
    exact.load_state_dict(layer.state_dict())
    wanted_input = images.clone().requires_grad_()
    wanted = exact(wanted_input)
    wanted.backward(slope)
    groups, _ = group_batch_norms(layer.train())
    share = BatchSharing(2, 0, 16).micro_batches(16)[0][world.rank]
    groups.begin_micro_batch(share.spans, share.shared_groups, share.count, 16)
    mine = slice(share.start, share.stop)
    got_input, got_slope = images[mine].to(dtype).requires_grad_(), slope[mine].to(dtype)
    wanted = wanted.detach()
    with Widest() as widest:
        got = layer(got_input)
        got.backward(got_slope)
    got = got.detach()
    bias = ((got.double() - wanted[mine]).mean((0, 2, 3))).abs().max()
    return (
        float(bias),
        float((got.double() - wanted[mine]).abs().max()),
        float((got_input.grad.double() - wanted_input.grad[mine]).abs().max()),
        widest.doubles,
    )


class Widest(TorchDispatchMode):
    """Counts the values of the largest tensor in double precision."""

    doubles = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor) and one.dtype == torch.float64:
                self.doubles = max(self.doubles, one.numel())
        return result


def _all_precisions(world):
    cases = (torch.bfloat16, 3.0), (torch.float16, 3.0), (torch.float32, 1000.0)
    return [_single_precision(world, dtype, mean) for dtype, mean in cases]


def test_shared_groups_are_as_exact_as_what_they_are_given():
    for answer in run_on_ranks(_all_precisions, 2):
        for found, most_bias, most_error in zip(answer, (0.002, 0.0003, 1e-6), (0.02, 0.002, 1e-5), strict=True):
            bias, error, gradient_error, doubles = found
            assert bias < most_bias
            assert error < most_error
            assert gradient_error < most_error
            assert doubles <= 16 * 8  # values per channel and per sample, nothing as large as the activation
