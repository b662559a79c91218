"""ResNet-18 on pictures of CIFAR-10's shape, 64 on each of 2 processes: images a second beside other tools.

    python -m bench.cifar_resnet [--python PYTHON] [--only NAME …] [--rounds 5] [--steps 8] [--out FILE.json]

Each tool with its own defaults, and this program also in the others' precision and layout. All take turns within a
round, in another order each time, so the ratios count. PYTHON has accelerate and lightning. What FILE.json holds is
gone on with, so that rounds may be measured one by one.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.contenders.cifar_resnet import BATCH, DECAY, MOMENTUM, PROCESSES, RATE, SAMPLES, WARM_UP
from bench.tables import keep, table

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "bench" / "contenders" / "cifar_resnet.py")
FP32 = {"train.precision": "fp32", "train.channels_last": "false"}
OURS = {"manyhands": {}, "manyhands fp32": FP32}
NAMES = [*OURS, "bare", "accelerate", "lightning"]


def environment():
    """One thread for each process, everything on loopback, this checkout importable."""
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths,
            "PYTHONWARNINGS": "ignore"}  # fmt: skip


def run(command):
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:8])} …\n{done.stderr[-3000:]}")
    return done.stdout


def ours(settings, steps):
    """By the clock, from the record after the warm-up to the last."""
    flags = {
        "train.batch": BATCH * PROCESSES, "train.max_steps": WARM_UP + steps + 1, "train.lr": RATE,
        "train.momentum": MOMENTUM, "train.weight_decay": DECAY, "train.schedule": "constant",
        "train.nesterov": "false",
        "train.evaluate_every": 0, "data.augment": "none", "run.report": "false", "run.log_every_s": 0.01, **settings,
    }  # fmt: skip
    words = [word for key, value in flags.items() for word in ("--set", f"{key}={value}")]
    data = f"synthetic:{SAMPLES}x3x32x32x10"
    with tempfile.TemporaryDirectory() as folder:
        out = ["--out", f"{folder}/run"]
        run([sys.executable, "-m", "manyhands", "train", data, "resnet18", "-n", str(PROCESSES), *words, *out])
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        rows = [row for row in lines if "samples" in row and row["step"] >= WARM_UP]
    first, last = rows[0], rows[-1]
    return (last["step"] - first["step"]) * BATCH * PROCESSES / (last["time"] - first["time"])


def rate(name, given):
    if name in OURS:
        return ours(OURS[name], given.steps)
    started = [given.python]
    if name != "lightning":
        started += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    printed = run([*started, SCRIPT, name, str(given.steps)])
    return next(json.loads(line)["images_per_s"] for line in printed.splitlines() if line.startswith('{"contender"'))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    known = given.out is not None and given.out.exists()
    found = json.loads(given.out.read_text())["values"] if known else {}
    for _ in range(given.rounds):
        for name in random.sample(given.only, len(given.only)):
            found.setdefault(name, []).append(rate(name, given))
            sys.stdout.write(f"{name} {found[name][-1]:.1f} images/s, load {os.getloadavg()[0]:.1f}\n")
            sys.stdout.flush()
        if given.out:
            keep(given.out, found, "images/s")
    sys.stdout.write(
        "\n".join([table(found, {}, "images/s"), "", table(found, {}, "images/s", mine="manyhands fp32"), ""])
    )


if __name__ == "__main__":
    main()
