"""Does local training reach data parallel's accuracy? python -m bench.accuracy OUT.jsonl [--settings …] [--seeds 0 1].

Runs the program itself, `manyhands train -n 3`, on a part of CIFAR-10, appends a line for each setting and seed to
OUT.jsonl, goes on where it was stopped, and prints the table of all lines: what each setting sends per step with
ResNet-18, and how far its top-1 is from plain data parallel's at the same seed and number of epochs.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


from manyhands.core.links import Link
from manyhands.sync.costs import Case
from manyhands.sync.methods import allreduce, local
from manyhands.sync.options import SyncOptions

HERE = Path(__file__).parent
BASE = "data parallel"

# 97.5 % quantiles of Student's t for 1 to 20 degrees of freedom.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip

# Plain data parallel runs as one process whose BatchNorm takes 8 samples at a time: the same updates as three
# processes that normalise their own 8, by the law of tests/processes/test_parity.py, at less cost.
ALONE = {"cluster.processes": 1, "train.norm_group": 8}


def slow(codec, every, delay, **more):
    """Local steps."""
    flags = {"sync.method": "local", "sync.codec": codec, "sync.every": every, "sync.delay": delay}
    return flags | {f"sync.{name}": value for name, value in more.items()}


SETTINGS = {
    BASE: ALONE,
    "data parallel, 3 processes": {"train.norm_group": "local"},
    "data parallel, BatchNorm over 24": {"cluster.processes": 1},
    "plain every 8, waiting": slow("none", 8, 0),
    "plain every 8, delay 7": slow("none", 8, 7, outer_momentum=0),
    "rank 4 every 4, waiting": slow("lowrank", 4, 0),
    "rank 4 every 4, delay 3": slow("lowrank", 4, 3, outer_momentum=0),
    "rank 4 every 8, waiting": slow("lowrank", 8, 0),
    "rank 4 every 8, delay 3": slow("lowrank", 8, 3, outer_momentum=0),
    "rank 4 every 8, delay 7": slow("lowrank", 8, 7, outer_momentum=0),
    "rank 4 every 8, delay 7, outer momentum 0.3": slow("lowrank", 8, 7, outer_momentum=0.3),
    "rank 4 every 8, delay 7, outer momentum 0.5": slow("lowrank", 8, 7, outer_momentum=0.5),
    "rank 1 every 8, delay 3": slow("lowrank", 8, 3, rank=1, outer_momentum=0),
    "rank 2 every 8, delay 3": slow("lowrank", 8, 3, rank=2, outer_momentum=0),
    "rank 8 every 16, waiting": slow("lowrank", 16, 0, rank=8),
    "rank 4 every 24, waiting": slow("lowrank", 24, 0),
    "rank 4 every 24, delay 7": slow("lowrank", 24, 7, outer_momentum=0),
    "rank 4 every 8, delay 3, nothing held": {
        **slow("lowrank", 8, 3, outer_momentum=0),
        "network": "forgetful_resnet.py",
    },
    "int4 every 24, delay 7": slow("int4", 24, 7, outer_momentum=0),
    "int4 every 72, delay 48": slow("int4", 72, 48),
    "DiLoCo's outer step for LLMs": slow("none", 8, 0, outer_lr=0.7, outer_momentum=0.9),
}


def train(setting, seed, recipe):
    """One line of the table: a run of the program."""
    began_s = time.monotonic()
    flags = recipe | {"cluster.processes": 3} | SETTINGS[setting] | {"train.seed": seed}
    network = f"{HERE / flags.pop('network', 'small_resnet.py')}:SmallResNet"
    with tempfile.TemporaryDirectory() as folder:
        words = [word for name, value in flags.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "manyhands", "train", "cifar10", network, "--out", f"{folder}/run", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        last = json.loads(Path(f"{folder}/run/evaluations/last.json").read_text())
    return {
        "setting": setting,
        "seed": seed,
        "top1": last["top1"],
        "loss": last["loss"],
        "step": last["step"],
        "took_s": round(time.monotonic() - began_s),
    }


def recipe_of(samples, epochs):
    """What all settings have in common."""
    return {
        "data.train_samples": samples,
        "data.augment": "crop-flip",
        "train.epochs": epochs,
        "train.batch": 24,
        "train.lr": 0.05,
        "train.schedule": "one-cycle",
        "train.drop_last": "true",
        "train.channels_last": "true",
        "train.evaluate_every": 0,
        "train.audit_every": 0,
        "checkpoint.every": "never",
        "run.report": "false",
        "run.log_every_s": 20,
        "cluster.threads": 1,
    }


def sent_kb(setting):
    """What one of three machines sends per step with ResNet-18 of 1,000 classes, in kB."""
    from torchvision import models

    from manyhands.config.load import load_job

    flags = {name: value for name, value in SETTINGS[setting].items() if name.startswith("sync.")}
    options = load_job({"data.name": "cifar10", **flags}, environment={}).job.sync
    model = models.resnet18()
    shapes = tuple(tuple(one.shape) for one in model.parameters())
    buffers = sum(one.numel() for one in model.buffers())
    case = Case(shapes, 4, buffers, 3, 1.0, 0.5, Link(1e6, 1e-3), 10_000)
    method = local if options.method == "local" else allreduce
    return method.estimate(case, options)[0].sent_bytes / 1000


def compared(lines, setting):
    """Paired differences in top-1 to data parallel, in points, by seed."""
    top1 = {(one["setting"], one["seed"]): 100 * one["top1"] for one in lines}
    return {seed: value - top1[BASE, seed] for (name, seed), value in top1.items() if name == setting and (BASE, seed) in top1}


def table(lines):
    """Markdown."""
    rows = ["| setting | kB per step | seeds | top-1 | data parallel | mean difference | 95 % interval |", "|" + " --- |" * 7]
    for setting in SETTINGS:
        found = compared(lines, setting)
        if not found or setting == BASE:
            continue
        mean, half = interval(list(found.values()))
        own = statistics.mean(100 * one["top1"] for one in lines if one["setting"] == setting and one["seed"] in found)
        shown = f"{mean - half:+.2f} to {mean + half:+.2f}" if half else "-"
        rows.append(f"| {setting} | {sent_kb(setting):,.0f} | {len(found)} | {own:.2f} | {own - mean:.2f} | {mean:+.2f} | {shown} |")
    return "\n".join(rows)


def interval(differences):
    """Mean, and half the width of its 95 % interval by Student's t; 0 where there is one difference only."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return mean, 0.0
    return mean, T_975[len(differences) - 2] * statistics.stdev(differences) / len(differences) ** 0.5
