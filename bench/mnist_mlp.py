"""The DDP introduction's job in manyhands and in other tools: images per second, and the time to the first step.

    MANYHANDS_DATA=DIR python -m bench.mnist_mlp [--python PYTHON] [--rounds 5]

Contenders take turns within each round, in another order each time, so that whatever else the machine does falls on
all of them alike: the ratios count, not the rates. Rates are what all processes together reach once warm. PYTHON has
what the others need.
"""

import argparse
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.contenders.shared import BATCH, PROCESSES, RATE, WARM_UP
from bench.tables import keep, ratios, table

ROOT = Path(__file__).parent.parent
LONGEST_S = 900


@dataclass(frozen=True)
class Contender:
    """One tool: the package it needs, and the command before the script's own arguments."""

    name: str
    package: str
    command: list[str]


@dataclass
class Results:
    """What was measured, by contender and round; a round that failed is None."""

    images_per_s: dict[str, list[float | None]] = field(default_factory=dict)
    first_step_s: dict[str, list[float | None]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    load: list[tuple[float, float, float]] = field(default_factory=list)


def contenders(scratch, python=sys.executable):
    """The others, started by the Python that has them."""
    port = free_port()
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    msrun = [str(Path(python).parent / "msrun"), "--worker_num", str(PROCESSES)]
    msrun += ["--local_worker_num", str(PROCESSES), "--join", "True"]
    msrun += ["--tail_worker_log", "0", "--log_dir", f"{scratch}/mindspore", "--master_port", str(port)]
    return [
        Contender("bare", "torch", [*torchrun, "-m", "bench.contenders.bare"]),
        Contender("alone", "torch", [*torchrun, "-m", "bench.contenders.bare", "--alone"]),
        Contender("document", "torch", [python, "-m", "bench.contenders.document"]),
        Contender("accelerate", "accelerate", [*torchrun, "-m", "bench.contenders.accelerate_loop"]),
        Contender("lightning", "lightning", [python, "-m", "bench.contenders.lightning_trainer"]),
        Contender("mindspore", "mindspore", [*msrun, str(ROOT / "bench/contenders/mindspore_cell.py")]),
    ]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def environment(program, source=None):
    """One thread for each process, everything on loopback, this checkout importable, `program`'s neighbors found."""
    path = f"{Path(program).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    here = {"PYTHONPATH": str(source or ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path}
    return {**os.environ, **here, "PYTHONWARNINGS": "ignore"}


def prepare(data_dir, scratch):
    """Lays MNIST as torchvision wants it, unpacked; read, and fetched if need be, by manyhands."""
    import torch

    from manyhands.data.open import open_data
    from manyhands.data.options import DataOptions

    splits = open_data(DataOptions(name="mnist", dir=data_dir))
    raw = scratch / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for word, split in (("train", splits.train), ("t10k", splits.test)):
        for kind, values in (("images-idx3", split.images[:, 0]), ("labels-idx1", split.labels.to(torch.uint8))):
            header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            (raw / f"{word}-{kind}-ubyte").write_bytes(header + values.numpy().tobytes())


def run(command, scratch, source=None):
    """Runs to the end, by the packages in `source` if given; standard output, or None with the reason on the screen."""
    try:
        done = subprocess.run(
            command,
            env=environment(command[0], source),
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    except OSError as error:
        say(f"  {error}")
        return None
    except subprocess.TimeoutExpired:
        say(f"  took more than {LONGEST_S} s: {' '.join(command[:6])} …")
        return None
    if done.returncode:
        say(f"  exit code {done.returncode}: {' '.join(command[:6])} …\n{done.stderr[-1500:]}")
        return None
    return done.stdout


def run_script(contender, steps, scratch):
    """The line of JSON that a contender's script printed, or an empty one."""
    output = run([*contender.command, "--data", str(scratch), "--steps", str(steps)], scratch) or ""
    lines = [line for line in output.splitlines() if line.startswith('{"contender"')]
    return json.loads(lines[-1]) if lines else {}


def run_manyhands(data_dir, steps, scratch, source=None):
    """Trains the same job, by the packages in `source` if given; the folder of the run, or None."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=scratch))
    settings = {
        "train.momentum": 0, "train.nesterov": "false", "train.weight_decay": 0, "train.schedule": "constant",
        "train.max_steps": steps, "train.epochs": 1000, "train.evaluate_every": 0,
    }  # fmt: skip
    command = [sys.executable, "-m", "manyhands", "train", "mnist", "mlp", "-n", str(PROCESSES), "--json", "--quiet"]
    command += ["--batch", str(BATCH * PROCESSES), "--lr", str(RATE), "--out", str(folder)]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command += ["--data-dir", data_dir] if data_dir else []
    return folder if run(command, scratch, source) is not None else None


def rate_of(folder):
    """Images a second by the clock, from the first record after the warm-up to the last."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "samples" in record and record["step"] >= WARM_UP]
    if len(steps) < 2:
        return None
    first, last = steps[0], steps[-1]
    return (last["step"] - first["step"]) * BATCH * PROCESSES / (last["time"] - first["time"])


def first_step_at(folder):
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return next(event["time"] for event in map(json.loads, lines) if event["kind"] == "first-step")


def measure_rates(given, results, scratch):
    entries = [one for one in contenders(scratch, given.python) if installed(one, given.python, results)]
    for number in range(given.rounds):
        order = [None, *entries]
        random.shuffle(order)
        for contender in order:
            name = contender.name if contender else "manyhands"
            if contender:
                rate = run_script(contender, given.steps, scratch).get("images_per_s")
            else:
                folder = run_manyhands(given.data_dir, given.steps + WARM_UP, scratch)
                rate = rate_of(folder) if folder else None
            note(results, results.images_per_s, name, rate)
            say(f"round {number + 1}: {name:<11} {rate or 0:>9,.0f} images/s   load {os.getloadavg()[0]:.1f}")


def measure_first_steps(given, results, scratch):
    bare = contenders(scratch)[0]
    for number in range(given.starts):
        order = ["manyhands", "torchrun"]
        random.shuffle(order)
        for name in order:
            started = time.time()
            if name == "torchrun":
                ended = run_script(bare, 0, scratch).get("first_step_at")
            else:
                folder = run_manyhands(given.data_dir, 1, scratch)
                ended = first_step_at(folder) if folder else None
            seconds = ended - started if ended else None
            note(results, results.first_step_s, name, seconds)
            say(f"start {number + 1}: {name:<11} {seconds or 0:>7.2f} s to first step   load {os.getloadavg()[0]:.1f}")


def installed(contender, python, results):
    found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({contender.package!r}) is None)"
    if not subprocess.run([python, "-c", found], check=False).returncode:
        return True
    results.missing[contender.name] = "not installed"
    return False


def note(results, table, name, value):
    table.setdefault(name, []).append(value)
    results.load.append(os.getloadavg())


def say(text):
    print(text, file=sys.stderr, flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("MANYHANDS_DATA", ""), help="where mnist/ lies")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000, help="timed steps in each turn")
    parser.add_argument("--starts", type=int, default=5, help="rounds of the time to the first step")
    parser.add_argument("--out", type=Path, default=Path("build/bench/mnist_mlp.json"))
    return parser.parse_args()


def main():
    given = arguments()
    results = Results()
    scratch = Path(tempfile.mkdtemp(prefix="manyhands-bench-"))
    try:
        prepare(given.data_dir, scratch)
        measure_rates(given, results, scratch)
        measure_first_steps(given, results, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    loads = [load[0] for load in results.load]
    print(f"MNIST, 784-256-10, {BATCH} on each of {PROCESSES} processes, {given.steps} steps after {WARM_UP}")
    print(f"load average {min(loads, default=0):.1f} to {max(loads, default=0):.1f} on {os.cpu_count()} cores\n")
    print(table(results.images_per_s, results.missing, "images/s") + "\n")
    print(table(results.first_step_s, {}, "first step, s"))
    rates = results.images_per_s
    beside = {name: ratios(rates, "manyhands", name) for name in rates}
    more = {"first_step_s": results.first_step_s, "missing": results.missing, "loads": loads}
    keep(given.out, rates, "images/s", steps=given.steps, ratios=beside, **more)
    print(f"\neverything measured: {given.out}")


if __name__ == "__main__":
    main()
