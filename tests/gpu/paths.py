"""Ways that only an accelerator takes, beside the ways that they stand for; see `cases.py`."""

import contextlib
import time
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from manyhands.core.devices import wait_for
from manyhands.data import loading
from manyhands.data.loading import CopiesAhead, open_loader
from manyhands.data.order import BatchSharing
from manyhands.data.packed import PictureNames
from manyhands.data.splits import ImageFiles, ImagesInMemory
from manyhands.data.transforms import Pixels
from manyhands.parallel.replicas import batch_norm as norm
from manyhands.parallel.replicas.batch_norm import group_batch_norms

# Of what is compared: relative to each tensor's largest value.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}
SHAPES = ((256, 64, 32, 32), (256, 128, 16, 16), (256, 512, 4, 4))


@contextlib.contextmanager
def _one_pass(allowed):
    before, norm.is_tested = norm.is_tested, lambda device: allowed
    try:
        yield
    finally:
        norm.is_tested = before


def _trained(layer, groups, group, images, slope, *, once):
    share = BatchSharing(1, 0, group).micro_batches(len(images))[0][0]
    groups.begin_micro_batch(share.spans, share.shared_groups, len(images), len(images))
    for one in (images, *layer.parameters()):
        one.grad = None
    groups.layers[0].seen = None
    with _one_pass(once):
        output = layer(images)
        output.backward(slope)
    return {
        "output": output.detach(), "input": images.grad, "weight": layer.weight.grad, "bias": layer.bias.grad,
        "seen": groups.layers[0].seen,
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
        wait_for(device)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        wait_for(device)
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


def _pictures(count, size):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    folder = Path("pictures")
    folder.mkdir()
    paths = [str(folder / f"{number}.png") for number in range(count)]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    labels = torch.arange(count) % 7
    return {"memory": ImagesInMemory(images, labels), "folder": ImageFiles(PictureNames.of(paths), labels)}


def _served(source, pixels, device, requests, *, ahead):
    """Sums of every batch's pictures [n] and labels, made on the device behind work that keeps it busy; seconds."""
    loader = open_loader(source, pixels, train=True, seed=1, device=device, workers=2)
    assert (loader._ahead._stream is None) == (device == "cpu"), "copies ahead are off"
    if not ahead:
        loader._ahead = CopiesAhead(torch.device("cpu"))
    busy = torch.rand(2048 if device != "cpu" else 64, device=device).diag()
    weights = torch.arange(3 * pixels.size**2, device=device, dtype=torch.float64)
    found = []
    wait_for(device)
    began = time.perf_counter()
    for batch in loader.batches(1, requests):
        for _ in range(8):
            busy = busy @ busy  # what was copied too early, or too late, would be seen behind this
        found.append(((batch.images.double().flatten(1) * weights).sum(1) + 0 * busy.sum(), batch.labels.clone()))
        del batch
    wait_for(device)
    seconds = time.perf_counter() - began
    loader.close()
    return [tuple(one.cpu() for one in pair) for pair in found], seconds


def copies_ahead_change_no_batch(device):
    """Of a folder and of a set in memory that isn't on the card; and how long an epoch takes with and without."""
    kept, loading._on_device = loading._on_device, lambda images, device: images
    pixels = Pixels(64, 3, (0.5,) * 3, (0.25,) * 3, "crop-flip")
    requests = torch.randperm(480, generator=torch.Generator().manual_seed(2)).split(48)
    seconds = {}
    try:
        for name, source in _pictures(480, 64).items():
            for _ in range(2):  # the first one warms up
                found = {}
                for ahead in (False, True):
                    what = f"{name}, {'ahead' if ahead else 'when needed'}"
                    found[ahead], seconds[what] = _served(source, pixels, device, requests, ahead=ahead)
                for batch, (one, other) in enumerate(zip(found[False], found[True], strict=True)):
                    assert torch.equal(one[0], other[0]), f"{name}: pictures of batch {batch} differ"
                    assert torch.equal(one[1], other[1]), f"{name}: labels of batch {batch} differ"
    finally:
        loading._on_device = kept
    return {"seconds": seconds}
