"""What an update of ResNet-18 takes with freed memory kept for the next one, and given back as the C library does.

    python -m bench.kept_memory [--rounds 5] [--batch 64] [--out FILE.json]

Forward, backward and optimizer on pictures of 32x32 in channels_last, one thread, each time in a process of its own, in
turns. Its own processor time, of which the system's part is what pages cost, the pages that it was given in an
update, and the most memory that it took.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from bench.tables import keep

UPDATES = 6


def measure(precision, kept, batch):
    """Seconds and pages of an update; MiB."""
    import torch

    from bench.contenders.cifar_resnet import network, optimizer_of
    from manyhands.parallel.gradients import autocast
    from manyhands.worker.heap import keep_freed_memory

    torch.set_num_threads(1)
    if kept:
        keep_freed_memory()
    model = network().to(memory_format=torch.channels_last)
    optimizer, labels = optimizer_of(model), torch.randint(10, (batch,))
    images = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def update():
        optimizer.zero_grad()
        with autocast(precision, "cpu"):
            loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()

    update()
    update()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(UPDATES):
        update()
    after = resource.getrusage(resource.RUSAGE_SELF)
    user, system, pages = (
        (getattr(after, name) - getattr(before, name)) / UPDATES for name in ("ru_utime", "ru_stime", "ru_minflt")
    )
    return {"seconds": user + system, "system": system, "pages": pages, "MiB": after.ru_maxrss / 1024}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], given.one[1] == "kept", given.batch)))
        return
    ways = [(precision, way) for precision in ("bf16", "fp32") for way in ("kept", "given back")]
    found = {way: [] for way in ways}
    for _ in range(given.rounds):
        for way in random.sample(ways, len(ways)):
            command = [sys.executable, "-m", "bench.kept_memory", "--batch", str(given.batch), "--one", *way]
            found[way].append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    for way in ways:
        middle = {name: statistics.median(one[name] for one in found[way]) for name in found[way][0]}
        beside = zip(found[way[0], "given back"], found[way], strict=True)
        ratio = statistics.median(other["seconds"] / one["seconds"] for other, one in beside)
        print(f"{', '.join(way)}: {middle['seconds']:.3f} s of a processor, {middle['system']:.3f} the system's, "
              f"{middle['pages']:,.0f} pages, {middle['MiB']:,.0f} MiB; given back : it {ratio:.3f}")  # fmt: skip
    if given.out:
        keep(given.out, {", ".join(way): [one["seconds"] for one in rounds] for way, rounds in found.items()}, "s")


if __name__ == "__main__":
    main()
