"""Processor time of an update of ResNet-18 on 32x32 pictures, 2 processes with one thread each, in turns.

    python -m bench.step_work [--batch 32] [--rounds 6]

A bare loop alone, the same under DDP, and this program's update in fp32 and as the defaults have it. Each process's
own processor time, its communication's threads included, hardly depends on what else the machine does; the clock does.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.processes.ranks import run_on_ranks
from torch.nn.functional import cross_entropy

from bench.contenders.cifar_resnet import DECAY, MOMENTUM, RATE, network, optimizer_of
from manyhands.config.load import load_job
from manyhands.core.folder import RunFolder
from manyhands.train.objects import Objects
from manyhands.worker.entry import _build

WAYS = {"manyhands fp32": ("fp32", False), "manyhands": ("auto", "auto")}


def plain(model, batch):
    """An update of a bare loop."""
    optimizer, images, labels = optimizer_of(model), torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))

    def update():
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return update


def ours(world, folder, batch, precision, channels_last):
    """An update as a run of this program makes it, its data included."""
    flags = {
        "data.name": "synthetic:4096x3x32x32x10", "data.augment": "none", "model.name": "resnet18",
        "train.batch": 2 * batch, "train.lr": RATE, "train.momentum": MOMENTUM, "train.weight_decay": DECAY,
        "train.evaluate_every": 0.0, "run.report": False,
        "train.precision": precision, "train.channels_last": channels_last,
    }  # fmt: skip
    folder.joinpath("ranks").mkdir(parents=True, exist_ok=True)
    trainer = _build(load_job(flags, environment={}).job, RunFolder(folder), world, {"live": Objects()})
    epochs = (trainer.feed.updates(epoch, 0) for epoch in itertools.count())
    updates = itertools.chain.from_iterable(epochs)

    def update():
        trainer.update(next(updates), trainer.progress.step)
        trainer.count_update()

    return update


def measure(world, folder, batch, rounds):
    """Seconds by way and round: of this process's processor, and of the clock."""
    torch.set_num_threads(1)
    ways = {"alone": plain(network(), batch),
            "bare DDP": plain(torch.nn.parallel.DistributedDataParallel(network()), batch)}  # fmt: skip
    ways |= {name: ours(world, Path(folder) / str(number), batch, *way) for number, (name, way) in
             enumerate(WAYS.items())}  # fmt: skip
    found = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            ways[name]()
            used = time.process_time() - used
            dist.barrier()
            if number:  # the first is for warming up
                found[name].append((used, time.perf_counter() - began))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run_on_ranks(measure, 2, folder, given.batch, given.rounds)
    bare = None
    for name in ("bare DDP", "alone", *WAYS):
        used = [max(one[0] for one in each) for each in zip(*(rank[name] for rank in found), strict=True)]
        clock = [each[1] for each in found[0][name]]
        bare = bare or used
        beside = [theirs / mine for mine, theirs in zip(used, bare, strict=True)]
        sys.stdout.write(
            f"{name:<15} {1e3 * statistics.median(used):5.0f} ms of a processor, {1e3 * statistics.median(clock):5.0f} "
            f"by the clock; bare DDP : it {statistics.median(beside):.2f} ({min(beside):.2f} to {max(beside):.2f})\n"
        )


if __name__ == "__main__":
    main()
