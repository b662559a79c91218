"""ImageNet's JPEGs to random 224 crops on two cores: images a second by this program and by main.py's way.

    python -m bench.pictures FOLDER [--rounds 5] [--also OTHER_CHECKOUT] [--out FILE.json]

FOLDER has class folders of JPEGs; they are linked several times over into a larger one. `main.py` is what PyTorch's
ImageNet example does: ImageFolder, RandomResizedCrop, ToTensor, Normalize, a DataLoader of two processes. This program
reads the folder (`folder`), a packed copy of it (`pack`) and one of `pack --size 256` (`pack-256`); `--also` does the
same by another checkout. All take turns within each round, in another order each time; a rate is of the pictures after
the first batches. Each is also given in processor time of all its processes, which other programs disturb less.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.tables import keep, ratios

BATCH, WORKERS, LINKS, WARM_UP = 64, 2, 16, 3
ROOT = Path(__file__).parent.parent
WAYS = ("folder", "pack", "pack-256")


def main_py(folder):
    import torch
    from torchvision import datasets, transforms

    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
    pictures = datasets.ImageFolder(folder, transforms.Compose(steps))
    loader = torch.utils.data.DataLoader(pictures, BATCH, shuffle=True, num_workers=WORKERS, pin_memory=True)
    yield from loader
    # Its processes end with the iterator.


def manyhands(folder):
    import torch

    from manyhands.data.loading import open_loader
    from manyhands.data.open import open_data, resolve_pixels
    from manyhands.data.options import DataOptions

    options = DataOptions(name=str(folder), packed=False)
    splits = open_data(options)
    loader = open_loader(splits.train, resolve_pixels(options, splits.pixels), train=True, seed=1, workers=WORKERS)
    order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(1))
    yield from ((batch.images, batch.labels) for batch in loader.batches(0, order.split(BATCH)))
    loader.close()


def measure(name, folder):
    """Images a second of wall time, and milliseconds of processor time for each image."""
    import torch

    torch.set_num_threads(1)
    seen = 0
    for number, (images, _) in enumerate((main_py if name == "main.py" else manyhands)(folder)):
        assert images.shape[1:] == (3, 224, 224), images.shape
        if number == WARM_UP:
            started, spent = time.perf_counter(), processor_s()
        elif number > WARM_UP:
            seen += len(images)
            ended = time.perf_counter(), processor_s()
    return seen / (ended[0] - started), 1000 * (ended[1] - spent) / seen


def processor_s():
    """What this process and its children have used."""
    mine = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (mine, *mine.children(recursive=True)))


def run(name, folder, source):
    command = [sys.executable, "-W", "ignore", "-m", "bench.pictures", str(folder), "--one", name]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def prepare(given, scratch):
    """The larger folder and its packed copies."""
    folder = scratch / "many"
    for place in sorted(Path(given.folder).glob("*/*")):
        own = folder / place.parent.name
        own.mkdir(parents=True, exist_ok=True)
        first = Path(shutil.copy(place, own / f"0-{place.name}"))
        for number in range(1, LINKS):
            os.link(first, own / f"{number}-{place.name}")
    command = [sys.executable, "-m", "manyhands", "pack", str(folder)]
    for name, more in (("pack", []), ("pack-256", ["--size", "256"])):
        subprocess.run([*command, *more, "--to", str(scratch / name)], check=True, stdout=subprocess.DEVNULL)
    return {"main.py": folder, "folder": folder, "pack": scratch / "pack", "pack-256": scratch / "pack-256"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--also", help="another checkout of this program")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, Path(given.folder))))
        return
    scratch = Path(tempfile.mkdtemp(prefix="manyhands-bench-"))
    try:
        places = prepare(given, scratch)
        jobs = {name: (name, places[name], ROOT / "src") for name in places}
        if given.also:
            jobs |= {f"also-{name}": (name, places[name], Path(given.also).resolve() / "src") for name in WAYS}
        rates, costs = {name: [] for name in jobs}, {name: [] for name in jobs}
        for number in range(given.rounds):
            for name in random.sample(list(jobs), len(jobs)):
                rate, cost = run(*jobs[name])
                rates[name].append(rate)
                costs[name].append(cost)
                figures = f"{rate:>6.0f} images/s {cost:>6.2f} ms   load {os.getloadavg()[0]:.1f}"
                print(f"round {number + 1}: {name:<14} {figures}", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    others = [name for name in jobs if name != "main.py"]
    beside = {name: ratios(rates, name, "main.py") for name in others}
    cheaper = {name: ratios(costs, "main.py", name) for name in others}
    print("times main.py's images a second, and its processor time by each: median (least to most)")
    for name in others:
        shown = [
            f"{statistics.median(of):.2f} ({min(of):.2f} to {max(of):.2f})" for of in (beside[name], cheaper[name])
        ]
        print(f"{name:<14} {shown[0]:<24} {shown[1]}")
    if given.out:
        keep(given.out, rates, "images/s", processor_ms=costs, ratios=beside, processor_ratios=cheaper)


if __name__ == "__main__":
    main()
