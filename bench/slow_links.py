"""Compares synchronization methods on slow links.

    python -m bench.slow_links OUT.jsonl [--rates 10mbit,none] [--methods allreduce,local:int4:72,local:lowrank:7]
        [--steps real,70ms] [--rounds 2]
    python -m bench.slow_links OUT.jsonl --table

Each process runs `manyhands train` in a network namespace of its own, whose link has the given rate in each direction
(needs root); "none" is no limit. The limit is set after the first steps. Methods and rates take turns in each round,
and every other round runs in reverse order, so that other load on the machine affects all of them alike.

A method is "allreduce", "bf16", "powersgd:RANK", "local:CODEC:EVERY:DELAY:RANK" (trailing parts may be left out), or
"alone": no synchronization. Steps are "real" (ResNet-18 with 1000 classes, 8 pictures of 32 x 32 per process, on the
CPU) or a sleep in place of forward and backward, such as "70ms".

Each turn adds a line to OUT.jsonl; the same command resumes where it stopped. Turns that would take longer than
--longest-s are recorded as skipped.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torchvision.models import resnet18

ROOT = Path(__file__).parent.parent
PICTURES, CLASSES = 8, 1000
FEWEST, MOST = 4, 40
SLEEP = "BENCH_SLEEP_S"
# Used only to choose the number of updates: bits sent per parameter and exchange, and parameters.
BITS = {"allreduce": 32, "bf16": 16, "int8": 8.1, "int4": 4.1, "none": 32, "powersgd": 0.5, "lowrank": 0.5, "alone": 0}
PARAMETERS, STEP_GUESS_S = 11_689_512, 0.25


class _SleepingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, seconds, output, gradients, *_):
        ctx.seconds, ctx.gradients = seconds, gradients
        return output.clone()

    @staticmethod
    def backward(ctx, _):
        time.sleep(ctx.seconds)
        return None, None, None, *ctx.gradients


class Sleeping(nn.Module):
    """ResNet-18's parameters with fixed gradients: sleeps a third of a step in forward and the rest in backward."""

    def __init__(self):
        super().__init__()
        self.network, self.seconds = resnet18(num_classes=CLASSES), float(os.environ[SLEEP])
        generator = torch.Generator().manual_seed(1)
        self.gradients = [torch.randn(one.shape, generator=generator) * 1e-4 for one in self.network.parameters()]

    def forward(self, pictures):
        time.sleep(self.seconds / 3)
        output = torch.zeros(len(pictures), CLASSES)
        return _SleepingBackward.apply(self.seconds * 2 / 3, output, self.gradients, *self.network.parameters())


def method_flags(method):
    name, *more = method.split(":")
    keys = {"local": ("codec", "every", "delay", "rank"), "powersgd": ("rank",)}.get(name, ())
    flags = ["--set", f"sync.method={'allreduce' if name == 'alone' else name}"]
    return flags + [word for key, value in zip(keys, more, strict=False) for word in ("--set", f"sync.{key}={value}")]


def planned(about, given):
    """Returns the number of updates before and during the measurement; 0 updates where a turn would take too long."""
    name, *more = about["method"].split(":")
    codec, every = (more[0], int(more[1])) if name == "local" else (name, 1)
    bits = BITS[codec] * PARAMETERS * 2 * (1 - 1 / given.processes)
    exchange_s = 0.0 if about["rate"] == "none" else bits / (int(about["rate"].removesuffix("mbit")) * 1e6)
    step_s = STEP_GUESS_S if about["steps"] == "real" else float(about["steps"].removesuffix("ms")) / 1e3
    round_s = max(every * step_s, exchange_s)
    rounds = max(FEWEST, min(MOST // every, int(given.budget_s / round_s)))
    return 2 * every + 2, every * rounds if rounds * round_s <= given.longest_s else 0


def take_turn(lab, about, given):
    before, updates = planned(about, given)
    if not updates:
        return {"skipped": True}
    limit(lab, None)
    alone = about["method"] == "alone"
    total = before + updates + 2
    samples = PICTURES * (1 if alone else given.processes)
    virtual = about["steps"] != "real"
    model = f"{__file__}:Sleeping" if virtual else "torchvision:resnet18"
    job = [f"synthetic:{samples * total}x3x32x32x{CLASSES}", model,
           "--batch", str(samples), "--epochs", "1", *method_flags(about["method"]), "--set", "run.report=false",
           "--set", f"train.max_steps={total}", "--set", "checkpoint.every=never",
           "--set", "train.precision=fp32", "--set", "train.channels_last=false"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if virtual:
        environment[SLEEP] = str(float(about["steps"].removesuffix("ms")) / 1e3)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        joining = ["--init", f"tcp://{lab.address(1)}:{probe.getsockname()[1]}", "--world-size", str(given.processes)]
        command = [sys.executable, "-m", "manyhands", "train", *job, "--out"]
        workers = [
            lab.exec(
                lab.hosts[rank],
                [*command, f"{folder}/{rank}"] if alone else [*command, f"{folder}/0", *joining, "--rank", str(rank)],
                env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for rank in range(given.processes)
        ]  # fmt: skip
        try:
            metrics = Path(folder, "0", "metrics.jsonl")
            wait_for_step(metrics, before, workers)
            limit(lab, None if about["rate"] == "none" else about["rate"])
            # The updates in flight while the limit is set are not measured.
            first = wait_for_step(metrics, steps_of(metrics)[-1]["step"] + 1, workers)
            sent = lab.sent_bytes(1)
            last = wait_for_step(metrics, before + updates, workers)
            sent = lab.sent_bytes(1) - sent
            load = os.getloadavg()[0]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            limit(lab, None)
    count = last["step"] - first["step"]
    return {"updates": count, "seconds": last["time"] - first["time"], "sent_bytes": sent, "load": load}


def wait_for_step(metrics, step, workers):
    """Returns the first step record with at least this step."""
    while True:
        ended = any(worker.poll() is not None for worker in workers)
        if found := [one for one in steps_of(metrics) if one["step"] >= step]:
            return found[0]
        if ended:
            raise RuntimeError(f"a process ended before step {step}")
        time.sleep(0.02)


def steps_of(metrics):
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record.get("kind") == "step"]


def limit(lab, rate):
    for host in lab.hosts:
        lab.rate(host, rate)


def key(record):
    return tuple(record[name] for name in ("steps", "rate", "method", "round", "processes"))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def show(records):
    """Prints one row for each kind of step, rate and method: medians over the rounds (lowest to highest)."""
    print("| steps | link | method | rounds | s/step | of allreduce without limit | sent kB/step | load |")
    print("|" + " --- |" * 8)
    measured = {}
    for record in records:
        measured.setdefault((record["steps"], record["rate"], record["method"]), {})[record["round"]] = record
    for (steps, rate, method), rounds in measured.items():
        found = {number: one["seconds"] / one["updates"] for number, one in rounds.items() if "seconds" in one}
        if not found:
            print(f"| {steps} | {rate} | {method} | skipped | | | | |")
            continue
        plain = measured.get((steps, "none", "allreduce"), {})
        ratios = [plain[n]["seconds"] / plain[n]["updates"] / value for n, value in found.items() if n in plain]
        of_plain = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        sent = statistics.median(rounds[n]["sent_bytes"] / rounds[n]["updates"] for n in found) / 1e3
        loads = [rounds[n]["load"] for n in found]
        print(f"| {steps} | {rate} | {method} | {len(found)} | {statistics.median(found.values()):.3f} | {of_plain} "
              f"| {sent:,.1f} | {min(loads):.1f} to {max(loads):.1f} |")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rates", default="10mbit,none")
    parser.add_argument("--methods", default="alone,allreduce,local:int4:72,local:lowrank:7")
    parser.add_argument("--steps", default="real")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=30, help="for one turn")
    parser.add_argument("--longest-s", type=float, default=400, help="turns that would take longer are skipped")
    parser.add_argument("--table", action="store_true", help="shows what OUT.jsonl has")
    given = parser.parse_args()
    if not given.table:
        measure(given)
    show(read(given.out))


def measure(given):
    from tests.network.lab import Lab, why_not

    if reason := why_not():
        sys.exit(f"bench.slow_links can't run here: {reason}")
    # Namespaces are removed when this process is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    done = {key(record) for record in read(given.out)}
    places = [(steps, rate) for steps in given.steps.split(",") for rate in given.rates.split(",")]
    turns = [(steps, rate, method) for steps, rate in places for method in given.methods.split(",")]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with Lab(hosts=given.processes) as lab:
        for number in range(given.rounds):
            for steps, rate, method in turns if number % 2 == 0 else reversed(turns):
                about = {"steps": steps, "rate": rate, "method": method, "round": number, "processes": given.processes}
                if key(about) not in done:
                    record = {**about, **take_turn(lab, about, given)}
                    with given.out.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(record) + "\n")
                    print(record, flush=True)


if __name__ == "__main__":
    main()
