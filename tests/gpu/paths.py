"""Ways that only an accelerator takes, beside the ways that they stand for; see `cases.py`."""

import time
from unittest import mock

import torch
from torch import nn

from manyhands.core.devices import wait_for_device
from manyhands.data.order import BatchSharing
from manyhands.parallel.replicas import batch_norm as norm
from manyhands.parallel.replicas.batch_norm import group_batch_norms

# Of what is compared: relative to each tensor's largest value.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}
SHAPES = ((256, 64, 32, 32), (256, 128, 16, 16), (256, 512, 4, 4))


def _trained(layer, groups, group, images, slope, *, once):
    share = BatchSharing(1, 0, group).micro_batches(len(images))[0][0]
    groups.begin_micro_batch(share.spans, share.shared_groups, len(images), len(images))
    for one in (images, *layer.parameters()):
        one.grad = None
    groups.layers[0].accumulated = None
    with mock.patch.object(norm, "is_tested_accelerator", return_value=once):
        output = layer(images)
        output.backward(slope)
    return {
        "output": output.detach(), "input": images.grad, "weight": layer.weight.grad, "bias": layer.bias.grad,
        "seen": groups.layers[0].accumulated,
    }  # fmt: skip


def _given(device, dtype, shape, layout):
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(shape[1]).to(device, torch.float64 if dtype == torch.float64 else torch.float32).train()
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
    images, slope = (
        torch.randn(shape, dtype=torch.float64).to(device, dtype).contiguous(memory_format=layout) for _ in range(2)
    )
    return layer, (images + 1).requires_grad_(), slope


def _seconds(work, device, repeats):
    best = float("inf")
    for _ in range(3):
        wait_for_device(device)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        wait_for_device(device)
        best = min(best, (time.perf_counter() - began) / repeats)
    return best


def groups_in_one_pass_are_what_each_is_alone(device):
    """Of a BatchNorm's forward and backward; and how long both take, of ResNet-18's layers at 256 CIFAR pictures."""
    worst, micros = {}, {}
    for layout in (torch.contiguous_format, torch.channels_last):
        for dtype, most in ROUNDING.items():
            layer, images, slope = _given(device, dtype, (64, 8, 9, 7), layout)
            groups, _ = group_batch_norms(layer)
            alone, together = (_trained(layer, groups, 8, images, slope, once=once) for once in (False, True))
            name = f"{dtype}, {layout}".replace("torch.", "")
            worst[name] = max(
                float((together[key].double() - one.double()).abs().max() / one.double().abs().max())
                for key, one in alone.items()
            )
            assert worst[name] <= most, (name, worst)
            assert together["output"].stride() == images.stride(), name
    on_card = device != "cpu"
    for shape in SHAPES if on_card else SHAPES[2:]:
        for dtype in (torch.float32, torch.bfloat16):
            layer, images, slope = _given(device, dtype, shape, torch.channels_last)
            groups, _ = group_batch_norms(layer)
            for group in (16, 64):
                for once in (False, True):
                    name = f"{'one pass' if once else 'each alone'}, groups of {group}, {dtype}, {list(shape)}"
                    seconds = _seconds(
                        lambda once=once, group=group, given=(layer, groups), values=(images, slope): _trained(
                            *given, group, *values, once=once
                        ),
                        device,
                        20 if on_card else 1,
                    )
                    micros[name.replace("torch.", "")] = round(1e6 * seconds)
    return {"worst": worst, "microseconds": micros}
