"""Two processes, one of them three times slower by a quota of processor time: equal shares against `auto`.

    python -m bench.uneven [--quota 0.3333] [--rounds 5] [--out FILE.json]

Each process has a group of its own (see `Groups`) and one thread; the fast one's may take a whole core. The
two ways take turns. Images a second and seconds of an evaluation are those of whole epochs but the first; with equal
shares an evaluation's blocks are dealt in turns. Then `auto` trains once more in double precision, on
pictures of 16 x 16, and its weights after 20 updates are compared with those of one undisturbed process. Needs root, as
making groups does.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from bench.tables import keep

SAMPLES, BATCH, UPDATES = 160, 32, 20
PERIOD_US = 10_000
ROOT = Path("/sys/fs/cgroup")
JOB = (
    "resnet18", "--batch", BATCH, "--epochs", UPDATES * BATCH // SAMPLES, "--set", "train.norm_group=8",
    "--set", "train.evaluate_batch=4", "--set", "run.report=false", "--checkpoint.every", "never", "--set",
    "cluster.threads=1",
)  # fmt: skip


@dataclass
class Groups:
    """Groups of processes that are held to a share of a core each; removed at the end.

    Attributes:
        quota: cores.
        count: of groups.
    """

    quota: float
    count: int
    folders: list = field(default_factory=list)

    def __enter__(self):
        for number in range(self.count):
            self.folders.append(self._make(f"manyhands-quota-{os.getpid()}-{self.quota:.3f}-{number}"))
        return self

    def __exit__(self, *error):
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _make(self, name):
        allowed = int(self.quota * PERIOD_US)
        if "cpu" in (ROOT / "cgroup.controllers").read_text().split() if (ROOT / "cgroup.controllers").exists() else 0:
            (ROOT / "cgroup.subtree_control").write_text("+cpu")
            folder = ROOT / name
            folder.mkdir()
            (folder / "cpu.max").write_text(f"{allowed} {PERIOD_US}")
            (folder / "cpu.weight").write_text("10000")
            return folder
        folder = ROOT / "cpu" / name
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(allowed))
        # Others on the machine wait, so that the quota is what a process gets.
        (folder / "cpu.shares").write_text("262144")
        return folder

    def start(self, number, *words):
        """Starts a command in a group."""
        enter = f'echo $$ > {self.folders[number]}/cgroup.procs && exec "$@"'
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["sh", "-c", enter, "sh", sys.executable, *map(str, words)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


def ended(process):
    """What it printed.

    Raises:
        RuntimeError: it failed.
    """
    out, err = process.communicate()
    if process.returncode:
        raise RuntimeError(err[-3000:])
    return out


def train(groups, out, *settings, side=32):
    """Of one run, with a process in each group: its shares, images a second, and seconds of an evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word for setting in settings for word in ("--set", setting)]
        common = [
            "train",
            f"synthetic:{SAMPLES}x3x{side}x{side}x10",
            *JOB,
            *words,
            "--init",
            f"file://{folder}/meet",
            "--world-size",
            len(groups),
            "--out",
            out,
        ]
        processes = [group.start(0, "-m", "manyhands", *common, "--rank", rank) for rank, group in enumerate(groups)]
        for process in processes:
            ended(process)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "images_per_s" in row and row["step"] > row["steps_per_epoch"]]
    seconds = sum(row["samples"] / row["images_per_s"] for row in steps)
    evaluations = [row["seconds"] for row in rows if row["kind"] == "evaluation"]
    taken = json.loads((out / "plan.json").read_text())["shares"]
    return taken, sum(row["samples"] for row in steps) / seconds, statistics.median(evaluations[1:])


def largest_difference(one, other):
    """Of the weights of two runs' ends: of each tensor's values, against the largest of them."""
    first, second = (load_file(max((out / "checkpoints").glob("step-*")) / "model.safetensors") for out in (one, other))
    assert first.keys() == second.keys()
    pairs = [(first[name].double(), second[name].double()) for name in first]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) for a, b in pairs)


def weights(fast, slow, folder):
    """Says how far the weights of `auto` in double precision are from those of one process by itself."""
    double = "train.precision=fp64"
    taken, _, _ = train([fast, slow], folder / "two", double, "cluster.shares=auto", side=16)
    train([fast], folder / "one", double, side=16)
    difference = largest_difference(folder / "two", folder / "one")
    print(f"double precision, {UPDATES} updates, shares {taken}: weights differ by {difference:.1e} at most from those "
          f"of one process, load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
    return difference


def main():
    given = argparse.ArgumentParser()
    given.add_argument("--quota", type=float, default=1 / 3)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--out", type=Path)
    given = given.parse_args()
    found = {"equal": [], "auto": []}
    with Groups(1.0, 1) as fast, Groups(given.quota, 1) as slow, tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            for shares, rows in found.items():
                out = Path(folder) / f"{shares}-{number}"
                rows.append(train([fast, slow], out, f"cluster.shares={shares}"))
                taken, rate, evaluation_s = rows[-1]
                print(f"{shares}: {rate:.2f} images/s, {taken}, an evaluation {evaluation_s:.2f} s, "
                      f"load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
        difference = weights(fast, slow, Path(folder))
    for what, place in (("images/s", 1), ("s of an evaluation", 2)):
        equal, auto = ([row[place] for row in rows] for rows in found.values())
        print(f"medians {statistics.median(equal):.2f} and {statistics.median(auto):.2f} {what}, ratio "
              f"{statistics.median(auto) / statistics.median(equal):.2f} (of each round "
              f"{', '.join(f'{b / a:.2f}' for a, b in zip(equal, auto, strict=True))})")  # fmt: skip
    if given.out:
        rates = {shares: [row[1] for row in rows] for shares, rows in found.items()}
        keep(given.out, rates | {"weights' difference": [difference]}, "images/s", runs=found)


if __name__ == "__main__":
    main()
