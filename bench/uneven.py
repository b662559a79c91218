"""Two processes, one of them three times slower by a quota of processor time: equal shares against `auto`.

    python -m bench.uneven [--quota 0.3333] [--rounds 5] [--out FILE.json]

Each process has a group of its own (see `plan_quota.Groups`) and one thread; the fast one's may take a whole core. The
two ways take turns. Images a second are those of whole epochs but the first. Needs root, as making groups does.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from bench.plan_quota import Groups, ended

DATA, BATCH = "synthetic:64x3x32x32x10", 32
JOB = (
    "train", DATA, "resnet18", "--batch", BATCH, "--epochs", 5, "--set", "train.norm_group=8", "--set",
    "train.evaluate_every=0", "--set", "run.report=false", "--checkpoint.every", "never", "--set", "cluster.threads=1",
)  # fmt: skip


def images_per_s(fast, slow, shares):
    """Of one run, and the shares that it took."""
    with tempfile.TemporaryDirectory() as folder:
        out, meet = Path(folder) / "run", f"file://{folder}/meet"
        common = [*JOB, "--set", f"cluster.shares={shares}", "--init", meet, "--world-size", 2, "--out", out]
        processes = [
            group.start(0, "-m", "manyhands", *common, "--rank", rank) for rank, group in enumerate((fast, slow))
        ]
        for process in processes:
            ended(process)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "images_per_s" in row and row["step"] > row["steps_per_epoch"]]
        seconds = sum(row["samples"] / row["images_per_s"] for row in steps)
        taken = json.loads((out / "plan.json").read_text())["shares"]
        return sum(row["samples"] for row in steps) / seconds, taken


def main():
    given = argparse.ArgumentParser()
    given.add_argument("--quota", type=float, default=1 / 3)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--out", type=Path)
    given = given.parse_args()
    found = {"equal": [], "auto": []}
    with Groups(1.0, 1) as fast, Groups(given.quota, 1) as slow:
        for _ in range(given.rounds):
            for shares, rows in found.items():
                rows.append(images_per_s(fast, slow, shares))
                print(f"{shares}: {rows[-1][0]:.2f} images/s, {rows[-1][1]}, load {os.getloadavg()[0]:.1f}", flush=True)
    equal, auto = ([rate for rate, _ in rows] for rows in found.values())
    print(f"medians {statistics.median(equal):.2f} and {statistics.median(auto):.2f} images/s, ratio "
          f"{statistics.median(auto) / statistics.median(equal):.2f} (of each round "
          f"{', '.join(f'{b / a:.2f}' for a, b in zip(equal, auto, strict=True))})")  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
