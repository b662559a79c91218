"""Runs the benches beside other tools and prints a table of required and measured ratios.

    make bench [DATA=FOLDER] [ROUNDS=5]
    python -m bench [NAME …] --data FOLDER [--peers PYTHON] [--rounds 5] [--out build/bench]

FOLDER has mnist/ as it is published, and imagenet-sample/, some class folders of ImageNet's JPEGs; PYTHON has
accelerate and lightning. "The DDP introduction" is a tutorial's MNIST job: 784-256-10, 32 pictures on each of two
processes, plain SGD. Each bench is a program with its own description, and runs the tools in turns; its results are
in NAME.json. A round of all benches takes about ten minutes on two cores. `bench.slow_links` takes longer and is run
separately.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.tables import ratios

DATA, PICTURES, PEERS = "DATA", "PICTURES", "PEERS"  # what the arguments of this program take the place of
BENCHES = {
    "mnist_mlp": ["--data-dir", DATA, "--python", PEERS, "--starts", "0"],
    "cifar_resnet": ["--python", PEERS],
    "pictures": [PICTURES],
    "start": ["--data-dir", DATA],
    "uneven": [],
    "memory": [],
    "own_cost": ["--data-dir", DATA],
}


@dataclass(frozen=True)
class Asked:
    """A ratio of two that a bench has measured, or one figure where there is no `other`."""

    what: str
    bench: str
    mine: str
    other: str
    least: float = float("-inf")
    most: float = float("inf")


ASKED = [
    Asked("the DDP introduction's job, of a bare DDP loop", "mnist_mlp", "manyhands", "bare", least=3),
    Asked("the same, of a loop that sends nothing", "mnist_mlp", "manyhands", "alone", least=0.6),
    Asked("the same, of the introduction's script", "mnist_mlp", "manyhands", "document", least=5),
    Asked("the same, of Accelerate", "mnist_mlp", "manyhands", "accelerate", least=5),
    Asked("the same, of Lightning", "mnist_mlp", "manyhands", "lightning", least=7),
    Asked("ResNet-18, defaults, of Accelerate (with bf16 in the processor)", "cifar_resnet", "manyhands", "accelerate",
          least=2),
    Asked("the same, of Lightning", "cifar_resnet", "manyhands", "lightning", least=2),
    Asked("ResNet-18, fp32, of a bare DDP loop", "cifar_resnet", "manyhands fp32", "bare", least=0.98),
    Asked("JPEGs from the folder, of main.py", "pictures", "folder", "main.py", least=1.5),
    Asked("the same, packed", "pictures", "pack", "main.py", least=1.5),
    Asked("the same, packed with --size 256", "pictures", "pack-256", "main.py", least=3),
    Asked("command to first update, of torchrun", "start", "manyhands", "torchrun", most=0.5),
    Asked("one of two processes three times slower, auto of equal shares", "uneven", "auto", "equal", least=1.4),
    Asked("the same in fp64: difference of weights after 20 updates", "uneven", "weights' difference", "", most=1e-9),
    Asked("resident memory, of a bare loop", "memory", "manyhands, resident, late", "bare loop, resident, late",
          most=1.1),
    Asked("the same, of its own 2,000 updates before", "memory", "manyhands, resident, late",
          "manyhands, resident, early", most=1.01),
    Asked("records, checks, checkpoints, in % of the DDP introduction's update", "own_cost",
          "DDP introduction, by the clock", "", most=10),
    Asked("the same, in % of ResNet-18's", "own_cost", "ResNet-18, by the clock", "", most=2),
]  # fmt: skip


def run(name: str, given: argparse.Namespace) -> bool:
    """One bench, whose output goes to the screen; False where it failed, which leaves no file of it."""
    peers = str(Path(given.peers).absolute())  # the benches start peers in other folders
    places = {DATA: str(given.data), PICTURES: str(given.data / "imagenet-sample"), PEERS: peers}
    words = [places.get(word, word) for word in BENCHES[name]]
    command = [sys.executable, "-m", f"bench.{name}", *words, "--rounds", str(given.rounds)]
    print(f"\n{' '.join(command)}", flush=True)
    found = given.out / f"{name}.json"
    found.unlink(missing_ok=True)
    if not subprocess.run([*command, "--out", str(found)], check=False).returncode:
        return True
    found.unlink(missing_ok=True)
    print(f"{name} failed", flush=True)
    return False


def lacks(names: list[str], data: Path) -> list[str]:
    """Folders that the benches need and that aren't there."""
    needed = {DATA: data / "mnist", PICTURES: data / "imagenet-sample"}
    words = {word for name in names for word in BENCHES[name]}
    return [str(place) for word, place in needed.items() if word in words and not place.is_dir()]


def line(asked: Asked, folder: Path) -> str:
    """What was asked, and the median of what was found in each round (least to most)."""
    path = folder / f"{asked.bench}.json"
    values = json.loads(path.read_text(encoding="utf-8"))["values"] if path.exists() else {}
    rounds = ratios(values, asked.mine, asked.other) if asked.other else values.get(asked.mine, [])
    limit = f"at least {asked.least:g}" if math.isfinite(asked.least) else f"at most {asked.most:g}"
    if not rounds:
        return f"| {asked.what} | {limit} | not measured | |"
    middle = statistics.median(rounds)
    holds = "holds" if asked.least <= middle <= asked.most else "does not hold"
    return f"| {asked.what} | {limit} | {middle:.3g} ({min(rounds):.3g} to {max(rounds):.3g}) | {holds} |"


def main() -> None:
    """Runs the benches that are named, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--data", type=lambda place: Path(place).resolve(), required=True)
    parser.add_argument("--peers", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    given = parser.parse_args()
    names = given.names or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        parser.error(f"no bench is named {', '.join(unknown)}: {', '.join(BENCHES)}")
    if missing := lacks(names, given.data):
        parser.error(f"there is no {' and no '.join(missing)}: --data names the folder that has them")
    given.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in names if not run(name, given)]
    print("\n| what | asked | median (least to most) | |\n| --- | --- | --- | --- |")
    print("\n".join(line(one, given.out) for one in ASKED if one.bench in names))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
