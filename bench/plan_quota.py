"""`manyhands plan` against what is then measured on 1 to 4 processes, each held to a share of a core.

    python -m bench.plan_quota [--quota 0.45] [--processes 4] [--updates 5] [--only resnet18] [--out FILE]

Each process has a group of its own with a quota of processor time (cgroup v2's cpu.max, or v1's cpu.cfs_quota_us), as
if it had a machine of its own; they talk over loopback. `plan --world-size 1..4` runs in such a group too.
Needs root, as making groups does.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

PERIOD_US = 10_000
ROOT = Path("/sys/fs/cgroup")
NETS = "bench/quota_nets.py"
# Batches are such that each of 1 to 4 processes has whole groups of BatchNorm.
COMMON = ("--batch", "48", "--set", "train.norm_group=4")
CASES = {
    "resnet18": ("synthetic:96x3x32x32x10", "resnet18", *COMMON),
    "vgg-head": ("synthetic:96x3x64x64x1000", f"{NETS}:vgg_head", *COMMON),
    "vit-tiny": ("synthetic:96x3x32x32x10", f"{NETS}:vit_tiny", *COMMON),
}
# What loopback carries is bounded by processors, which have a price of their own.
LINK = "100gbit"


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


def predicted(groups, words, processes):
    """Milliseconds of a step by the number of processes, as the table of one `plan --world-size 1..N` says."""
    out = ended(groups.start(0, "-m", "manyhands", "plan", *words, "-n", f"1..{processes}", "--link", LINK, "--json"))
    return {row["processes"]: row for row in json.loads(out.splitlines()[-1])["rows"]}


def measured(groups, words, processes, updates):
    """Milliseconds of each of some updates in the mode data, on the slowest process."""
    with tempfile.TemporaryDirectory() as folder:
        init = f"file://{folder}/meet"
        started = [
            groups.start(rank, "-m", "bench.quota_worker", rank, processes, init, updates, *words)
            for rank in range(processes)
        ]
        try:
            return json.loads([ended(one) for one in started][0].splitlines()[-1])  # noqa: RUF015 - all are waited for
        finally:
            for one in started:
                if one.poll() is None:
                    one.kill()
                    one.wait()


def main():
    given = argparse.ArgumentParser()
    given.add_argument("--quota", type=float, default=0.45)
    given.add_argument("--processes", type=int, default=4)
    given.add_argument("--updates", type=int, default=5)
    given.add_argument("--only", choices=list(CASES))
    given.add_argument("--out", type=Path)
    given = given.parse_args()
    lines = ["| network | processes | predicted ms | of it compute | measured ms (median) | least to most | off by |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    print("\n".join(lines), flush=True)
    with Groups(given.quota, given.processes) as groups:
        for name in [given.only] if given.only else CASES:
            began = time.time()
            says = predicted(groups, CASES[name], given.processes)
            print(f"planned in {time.time() - began:.0f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            for count in range(1, given.processes + 1):
                taken = measured(groups, CASES[name], count, given.updates)
                middle, row = statistics.median(taken), says[count]
                lines.append(
                    f"| {name} | {count} | {row['step_ms']:.0f} | {row['compute_ms']:.0f} | {middle:.0f} | "
                    f"{min(taken):.0f} to {max(taken):.0f} | {row['step_ms'] / middle - 1:+.0%} |"
                )
                print(lines[-1], flush=True)
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
