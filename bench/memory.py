"""Memory of each of 2 processes that train on as many pictures as CIFAR-10 has, beside a bare loop's under DDP.

    python -m bench.memory [--rounds 3] [--steps 2400] [--out FILE.json]

Both hold 50,000 pictures of 32 x 32 as bytes and train a small network, 64 pictures on each process. Resident memory
(with what processes share), and proportional (each process's part of that), in MiB: after 400 updates and after STEPS.
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
from pathlib import Path

import psutil

from bench.tables import keep

ROOT = Path(__file__).parent.parent
EARLY = 400


def family(pid):
    """A process and all below it."""
    head = psutil.Process(pid)
    return [head, *head.children(recursive=True)]


def figures_of(processes):
    """By process: what it is, its CPU seconds, resident and proportional memory in MiB, threads and descriptors."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            memory, cpu = process.memory_full_info(), process.cpu_times()
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
            found.append({
                "pid": process.pid, "parent": process.ppid(), "command": " ".join(process.cmdline())[-80:],
                "cpu_s": cpu.user + cpu.system, "rss_mib": memory.rss / 2**20, "pss_mib": memory.pss / 2**20,
                "own_mib": memory.uss / 2**20, "peak_mib": peak / 1024,
                "threads": process.num_threads(), "descriptors": process.num_fds(),
            })  # fmt: skip
    return found


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}  # fmt: skip


def ours(folder, steps):
    words = ["--set", "run.report=false", "--set", "train.evaluate_every=0", "--set", "data.augment=none"]
    command = [sys.executable, "-m", "manyhands", "train", "synthetic:50000x3x32x32x10", "mlp", "-n", "2", "--quiet"]
    return [*command, "--batch", "128", "--set", f"train.max_steps={steps}", *words, "--out", f"{folder}/run"]


def bare(_folder, steps):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*torchrun, str(ROOT / "bench/contenders/cifar_memory.py"), str(steps)]


def step_of(folder, output):
    """How far a run is, by its own words."""
    metrics = Path(folder, "run", "metrics.jsonl")
    if metrics.exists():
        steps = [row["step"] for row in map(json.loads, metrics.read_text().splitlines()) if "step" in row]
        return max(steps, default=0)
    said = [int(line) for line in output.read_text().split() if line.isdecimal()]
    return max(said, default=0)


def measure(command_of, steps):
    """Mean of the two training processes, early and late: (resident, proportional)."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        with output.open("wb") as out:
            process = subprocess.Popen(
                command_of(folder, steps + 400), env=environment(), stdout=out, stderr=subprocess.STDOUT
            )
            while process.poll() is None:
                step = step_of(folder, output)
                for name, at in (("early", EARLY), ("late", steps)):
                    if name not in found and step >= at:
                        found[name] = _of_two(process.pid)
                time.sleep(0.05)
        if process.returncode or len(found) < 2:
            raise SystemExit(f"{command_of.__name__} ended with {process.returncode}, {found}: {output.read_text()}")
    return found


def _of_two(pid):
    # The two that train are the leaves: what started them has no more than torch imported.
    all_of = figures_of(family(pid))
    parents = {one["parent"] for one in all_of}
    leaves = [one for one in all_of if one["pid"] not in parents]
    return [statistics.mean(one[key] for one in leaves) for key in ("rss_mib", "pss_mib")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {}
    rounds = [{way.__name__: measure(way, given.steps) for way in (ours, bare)} for _ in range(given.rounds)]
    for when in ("early", "late"):
        for number, what in enumerate(("resident", "proportional")):
            mine, theirs = ([one[way][when][number] for one in rounds] for way in ("ours", "bare"))
            ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
            found |= {f"manyhands, {what}, {when}": mine, f"bare loop, {what}, {when}": theirs}
            values = [" ".join(f"{value:.0f}" for value in each) for each in (mine, theirs)]
            sys.stdout.write(f"{what}, {when}: {values[0]} MiB; bare loop {values[1]} MiB; ratio {ratio:.2f}\n")
    if given.out:
        keep(given.out, found, "MiB", steps=given.steps)


if __name__ == "__main__":
    main()
