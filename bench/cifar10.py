"""CIFAR-10 to an accuracy: the whole of `manyhands train cifar10 --recipe cifar10-fast`, beside one epoch of others.

    python -m bench.cifar10 --data DIR --seeds 1 2 3 --peer "NAME EPOCHS COMMAND" --keep cifar10.json

A peer's command measures some updates and prints, as its last line, {"wall": s, "cpu": s} of one epoch; EPOCHS is what
its authors say that it needs. Each seed's run and all peers take turns. Seconds of processors count, since a machine
that others use as well gives each program another share of the clock; our own are those of the whole command, from the
head's first import to the report, the others' those of training alone.
"""

import argparse
import json
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def used_s() -> float:
    """Seconds that processors have spent on this program's ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def last_line(command: list[str]) -> dict:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def ours(data: str, seed: int, more: list[str]) -> dict:
    """One whole run: its last top-1, and its seconds."""
    started, before = time.perf_counter(), used_s()
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "cifar10", "--recipe", "cifar10-fast", "-n", "2", "--data-dir", data, "--seed", str(seed)]
        command = [sys.executable, "-m", "manyhands", *words, "--out", str(Path(folder, "run")), "--json", "-q", *more]
        found = last_line(command)
    return {
        "seed": seed,
        "top1": found["final_top1"],
        "wall": time.perf_counter() - started,
        "cpu": used_s() - before,
    }


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="where CIFAR-10 lies, as --data-dir")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--peer", action="append", default=[], metavar='"NAME EPOCHS COMMAND"')
    parser.add_argument("--more", default="", help="further flags of manyhands train")
    parser.add_argument("--keep", type=Path, help="add each round to this file, as a line of JSON")
    given = parser.parse_args()
    peers = [(name, float(epochs), command) for name, epochs, *command in map(shlex.split, given.peer)]
    rounds = []
    for seed in given.seeds:
        found = {"ours": ours(given.data, seed, shlex.split(given.more))}
        found |= {name: last_line(command) for name, _, command in peers}
        rounds.append(found)
        print(json.dumps(found), flush=True)
        if given.keep:
            with given.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
    top1 = [100 * one["ours"]["top1"] for one in rounds]
    print(f"ours: top-1 {statistics.mean(top1):.2f} % on average ({min(top1):.2f} to {max(top1):.2f})")
    print(f"ours: {spread([one['ours']['cpu'] for one in rounds])} s of processors, the whole command")
    for name, epochs, _ in peers:
        ratios = [epochs * one[name]["cpu"] / one["ours"]["cpu"] for one in rounds]
        epoch = spread([one[name]["cpu"] for one in rounds])
        print(f"{name}: {epoch} s an epoch, times {epochs:g} epochs: {spread(ratios)} times ours")


if __name__ == "__main__":
    main()
