"""Do local steps reach data parallel's accuracy? python -m bench.accuracy OUT.jsonl [--settings …] [--seeds 0 1 2].

Runs the program itself, `manyhands train -n 3`, on a part of CIFAR-10; all other pictures judge. Appends a line for
each setting and seed to OUT.jsonl, goes on where it was stopped, and prints the table of all lines: what each setting
sends per step with ResNet-18, and how far its top-1 is from plain data parallel's at the same seed and as many epochs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from manyhands.config.load import load_job
from manyhands.core.link_speeds import LinkSpeed
from manyhands.sync.costs import LinkCase
from manyhands.sync.methods import allreduce, local, powersgd

HERE = Path(__file__).parent
BASE = "data parallel"

# What all settings have in common, but for how long they train: 4,992 or 1,650 updates of 3 x 8 samples. "usual" has
# the rate of PyTorch's example for ImageNet, 0.1 for 256 samples, hence 0.0094 for 24: the mean of a cycle up to 0.02.
# "hot" has more than twice that, and a third of the updates.
RECIPES = {
    "usual": {"data": "of_5000", "train.epochs": 24, "train.lr": 0.02},
    "hot": {"data": "of_1600", "train.epochs": 25, "train.lr": 0.05},
}
# Pictures that judge, of CIFAR-10's 60,000, by recipe.
JUDGES = {"usual": 55_000, "hot": 58_400}
COMMON = {
    "data.augment": "crop-flip",
    "train.batch": 24,
    "train.drop_last": "true",
    "train.schedule": "one-cycle",
    "train.precision": "fp32",
    "train.channels_last": "true",
    "train.evaluate_every": 0,
    "train.audit_every": 0,
    "checkpoint.every": "never",
    "run.report": "false",
    "run.log_every_s": 20,
    "cluster.threads": 1,
    "cluster.processes": 3,
}

# Of Student's t, for 1 to 20 degrees of freedom.
QUANTILES_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


def slow(codec, every, delay, *, rank=4, outer_lr=1.0, outer_momentum=0.0):
    """Local steps."""
    return {
        "sync.method": "local",
        "sync.codec": codec,
        "sync.every": every,
        "sync.delay": delay,
        "sync.rank": rank,
        "sync.outer_lr": outer_lr,
        "sync.outer_momentum": outer_momentum,
    }


SETTINGS = {
    # One process whose BatchNorm takes 8 samples at a time makes the same updates as three that normalise their own 8,
    # by the law of tests/processes/test_parity.py, in less time.
    BASE: {"cluster.processes": 1, "train.norm_group": 8},
    "data parallel in bf16": {"cluster.processes": 1, "train.norm_group": 8, "train.precision": "bf16"},
    "data parallel on 3 processes": {"train.norm_group": "local"},
    "data parallel, BatchNorm over 24": {"cluster.processes": 1},
    "gradients of rank 6": {"sync.method": "powersgd", "sync.rank": 6},
    "gradients of rank 4": {"sync.method": "powersgd", "sync.rank": 4},
    "gradients of rank 3": {"sync.method": "powersgd", "sync.rank": 3},
    "gradients of rank 2": {"sync.method": "powersgd", "sync.rank": 2},
    "plain every 8, waiting": slow("none", 8, 0),
    "rank 4 every 4, delay 3": slow("lowrank", 4, 3),
    "rank 4 every 4, delay 3, outer momentum 0.5": slow("lowrank", 4, 3, outer_momentum=0.5),
    "rank 4 every 8, waiting": slow("lowrank", 8, 0),
    "rank 4 every 8, delay 3": slow("lowrank", 8, 3),
    "rank 4 every 4, waiting": slow("lowrank", 4, 0),
    "rank 4 every 4, delay 1": slow("lowrank", 4, 1),
    "rank 4 every 8, delay 7": slow("lowrank", 8, 7),
    "rank 4 every 12, delay 11": slow("lowrank", 12, 11),
    "rank 1 every 8, delay 3": slow("lowrank", 8, 3, rank=1),
    "rank 4 every 25, delay 7": slow("lowrank", 25, 7),
    "rank 4 every 8, delay 3, nothing held": {**slow("lowrank", 8, 3), "network": "forgetful_resnet.py"},
    "int4 every 64, delay 32": slow("int4", 64, 32),
    "DiLoCo's outer step for LLMs": slow("none", 8, 0, outer_lr=0.7, outer_momentum=0.9),
}


def train(recipe, setting, seed):
    """A line of the table: one run of the program."""
    began_s = time.monotonic()
    flags = COMMON | RECIPES[recipe] | SETTINGS[setting] | {"train.seed": seed}
    network = f"{HERE / flags.pop('network', 'small_resnet.py')}:SmallResNet"
    data = f"{HERE / 'unseen_cifar10.py'}:{flags.pop('data')}"
    words = [word for name, value in flags.items() for word in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "manyhands", "train", data, network, "--out", str(out), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{setting}, seed {seed}: {done.stderr[-2000:]}")
        last = json.loads((out / "evaluations" / "last.json").read_text())
    return {
        "recipe": recipe,
        "setting": setting,
        "seed": seed,
        "top1": last["top1"],
        "loss": last["loss"],
        "judged_by": last["count"],
        "step": last["step"],
        "took_s": round(time.monotonic() - began_s),
    }


def sent_kb(setting):
    """What each of three machines sends per step with ResNet-18 of 1,000 classes, in kB."""
    from torchvision import models  # takes seconds, and only the table needs it

    flags = {name: value for name, value in SETTINGS[setting].items() if name.startswith("sync.")}
    options = load_job({"data.name": "cifar10", **flags}, environment={}).job.sync
    model = models.resnet18()
    shapes = tuple(tuple(parameter.shape) for parameter in model.parameters())
    buffers = sum(buffer.numel() for buffer in model.buffers())
    case = LinkCase(shapes, 4, buffers, 3, step_s=0.15, backward_s=0.1, link=LinkSpeed(1.2e6, 1e-3), steps=10_000)
    method = {"local": local, "powersgd": powersgd}.get(options.method, allreduce)
    return method.estimate(case, options)[0].sent_bytes / 1000


def differences(lines, setting):
    """In top-1 to data parallel, in points, of each seed that both have."""
    top1 = {(line["setting"], line["seed"]): 100 * line["top1"] for line in lines}
    seeds = [seed for name, seed in top1 if name == setting and (BASE, seed) in top1]
    return {seed: top1[setting, seed] - top1[BASE, seed] for seed in seeds}


def interval(values):
    """Mean, and half the width of its 95 % interval by Student's t; None where one value says nothing of it."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, None
    return mean, QUANTILES_975[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5


def table(lines):
    """Markdown."""
    rows = ["| setting | kB a step | seeds | mean difference | 95 % interval | each seed |", "|" + " --- |" * 6]
    for setting in SETTINGS:
        found = differences(lines, setting)
        if setting == BASE or not found:
            continue
        mean, half = interval(list(found.values()))
        between = "-" if half is None else f"{mean - half:+.2f} to {mean + half:+.2f}"
        each = ", ".join(f"{found[seed]:+.1f}" for seed in sorted(found))
        rows.append(f"| {setting} | {sent_kb(setting):,.0f} | {len(found)} | {mean:+.2f} | {between} | {each} |")
    base = [100 * line["top1"] for line in lines if line["setting"] == BASE]
    spread = f", spread {statistics.stdev(base):.2f}" if len(base) > 1 else ""
    rows += ["", f"{BASE}: top-1 {statistics.mean(base):.2f} %{spread}, {len(base)} seeds" if base else ""]
    return "\n".join(rows)


def main():
    """Runs what is missing in the file, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", choices=RECIPES, default="usual")
    parser.add_argument("--settings", nargs="*", default=[BASE, "rank 4 every 4, delay 3"])
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(8)))
    parser.add_argument("--together", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    judges = JUDGES[options.recipe]
    lines = [line for line in lines if (line["recipe"], line.get("judged_by")) == (options.recipe, judges)]
    done = {(line["setting"], line["seed"]) for line in lines}
    wanted = [(setting, seed) for seed in options.seeds for setting in options.settings if (setting, seed) not in done]
    with ThreadPoolExecutor(options.together) as pool, options.out.open("a") as file:
        for line in pool.map(lambda case: train(options.recipe, *case), wanted):
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
    sys.stdout.write(table(lines) + "\n")


if __name__ == "__main__":
    main()
