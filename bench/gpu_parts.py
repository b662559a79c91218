"""What `make bench-gpu` measures: each part beside a bare loop on the same card, in a process of its own.

The loop knows no framework: random pictures that lie on the card, autocast, torch's fused SGD. What a run of manyhands
does beside (augmentation, metrics, evaluation's preparation, checkpoints at the end) is in its figures.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from PIL import Image
from tests.e2e import command
from tests.gpu.case import Skip
from tests.processes.updates import built, updates
from torch import nn
from torchvision import models

from manyhands.core.devices import wait_for_device
from manyhands.core.world import World

QUIET = ["--set", "run.report=false", "--set", "train.evaluate_every=0", "--checkpoint.every", "never"]
ROUNDS = 3


def _bare_steps(model, images, labels):
    """Makes an update on the same pictures at each `next`."""
    kind = images.device.type
    images = images.to(memory_format=torch.channels_last)
    model = model.to(images.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    while True:
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu"):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        yield


def _bare(model, shape, classes, device, updates):
    """Images a second of a loop that does nothing else, and the most memory that it takes in MiB."""
    steps = _bare_steps(model, torch.rand(shape, device=device), torch.arange(shape[0], device=device) % classes)
    for _ in range(3):
        next(steps)
    wait_for_device(device)
    began = time.perf_counter()
    for _ in range(updates):
        next(steps)
    wait_for_device(device)
    took = time.perf_counter() - began
    peak = torch.get_device_module(device).max_memory_allocated(device) >> 20 if device != "cpu" else 0
    return {"images_per_s": shape[0] * updates / took, "memory_mib": peak}


def _ours(out, words, device):
    """Images a second after the first epoch, and seconds from the command to the first update."""
    began = time.time()
    half = ["--set", f"train.precision={'bf16' if device != 'cpu' else 'fp32'}", "--set", "train.channels_last=true"]
    command.done(["train", *words, "--device", device, "--out", out, *half, *QUIET], by=command.start)
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step" and row["step"] > row["steps_per_epoch"]]
    seconds = sum(row["samples"] / row["images_per_s"] for row in steps)
    first = command.events(out, "first-step")[0]["time"] - began
    return {"images_per_s": sum(row["samples"] for row in steps) / seconds, "first_step_s": first}


def _beside(device, words, model, shape, classes, updates):
    """Both in turns; medians and the ratio of each round."""
    ours, bare = [], []
    for number in range(ROUNDS):
        ours.append(_ours(f"run-{number}", words, device))
        bare.append(_bare(model(num_classes=classes), shape, classes, device, updates))
    ratios = [one["images_per_s"] / other["images_per_s"] for one, other in zip(ours, bare, strict=True)]
    return {
        "ours": ours[-1] | {"images_per_s": statistics.median(one["images_per_s"] for one in ours)},
        "bare": bare[-1] | {"images_per_s": statistics.median(one["images_per_s"] for one in bare)},
        "ratios": ratios,
    }


def resnet18_at_32(device):
    batch, count, epochs = (512, 25_600, 6) if device != "cpu" else (16, 64, 2)
    words = [f"synthetic:{count}x3x32x32x10", "resnet18", "--batch", batch, "--epochs", epochs]
    return _beside(device, words, _small_resnet, (batch, 3, 32, 32), 10, 100 if device != "cpu" else 3)


def _small_resnet(num_classes):
    """As the architecture of that name here: a stem for small pictures."""
    model = models.resnet18(num_classes=num_classes)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def kernels_of_an_update(device):
    """What an update of ResNet-18 on 512 pictures of 32x32 launches, and its milliseconds. On a CPU, ops are counted.

    Unlike a speed, the number of kernels doesn't depend on the machine.
    """
    kind, batch, size = device.partition(":")[0], *((512, 32) if device != "cpu" else (32, 8))
    settings = {
        "data.name": f"synthetic:{50 * batch}x3x{size}x{size}x10", "train.batch": batch, "train.epochs": 9,
        "train.precision": "bf16" if device != "cpu" else "fp32", "train.channels_last": True, "run.report": False,
    }  # fmt: skip
    pictures, labels = torch.rand(batch, 3, size, size, device=device), torch.arange(batch, device=device) % 10
    found = {"bare": _profiled(kind, _bare_steps(_small_resnet(10), pictures, labels))}
    for group in (32, "global"):
        with built(World(device=device), _small_resnet(10), {**settings, "train.norm_group": group}) as trainer:
            found[f"norm_group {group}"] = _profiled(kind, updates(trainer, 100))
    return found


def _profiled(kind, steps):
    for _ in range(5):
        next(steps)
    wait_for_device(kind)
    began = time.perf_counter()
    for _ in range(20):
        next(steps)
    wait_for_device(kind)
    milliseconds = 1000 * (time.perf_counter() - began) / 20
    with torch.profiler.profile() as profile:
        next(steps)
        wait_for_device(kind)
    # Of a device's events; on a CPU, of the ops that call no other.
    own = [one for one in profile.events() if kind in str(one.device_type).lower() and not one.cpu_children]
    device_ms = sum(one.device_time_total for one in own) / 1000
    return {"kernels": len(own), "device_ms": round(device_ms, 2), "milliseconds": round(milliseconds, 2)}


def resnet50_at_224_from_packed(device):
    batch, count, epochs = (256, 4096, 3) if device != "cpu" else (4, 16, 2)
    size = 224 if device != "cpu" else 64
    for split, pictures in (("train", count), ("val", 8)):
        for label in range(2):
            folder = Path("pictures", split, str(label))
            folder.mkdir(parents=True)
            for number in range(pictures // 2):
                pattern = torch.randint(0, 256, (8, 8, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pattern).resize((256, 256), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg")
    command.done("pack pictures", by=command.start)
    words = ["pictures", "torchvision:resnet50", "--batch", batch, "--epochs", epochs, "--set",
             f"data.image_size={size}"]  # fmt: skip
    return _beside(device, words, models.resnet50, (batch, 3, size, size), 2, 30 if device != "cpu" else 2)


def _cifar10(device, *words):
    """The best accuracy of a run, and seconds from its first update until 94 %, if it comes so far."""
    if device == "cpu":
        raise Skip("needs an accelerator")
    if "MANYHANDS_DATA" not in os.environ:
        raise Skip("needs CIFAR-10: MANYHANDS_DATA names the folder that has it")
    command.done(["train", "cifar10", *words, "--device", device, "--out", "run", *QUIET[:2]], by=command.start)
    rows = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]
    seen = [row for row in rows if row["kind"] == "evaluation"]
    first = command.events("run", "first-step")[0]["time"]
    good = next((row["time"] - first for row in seen if row["top1"] >= 0.94), None)
    last = max(row["time"] for row in rows) - first
    return {"top1": max(row["top1"] for row in seen), "seconds": last, "seconds to 94 %": good}


def cifar10_by_the_fast_recipe(device):
    return _cifar10(device, "--recipe", "cifar10-fast")


def cifar10_to_94_by_resnet18(device):
    return _cifar10(device, "resnet18", "--epochs", 30, "--batch", 512)


if __name__ == "__main__":
    from tests.gpu import case

    from bench import gpu_parts

    case.answer(gpu_parts, *sys.argv[1:])
