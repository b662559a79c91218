"""What compiling a network gains, and takes: `python -m bench.compile_gain [--rounds 3] [--json FILE]`.

The measurement by which `train.compile=auto` decides (manyhands.worker.compile_trial), of some networks and precisions,
each in a process of its own on one thread, with an empty folder of compiled code each time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import cloudpickle
import torch

from manyhands.config.load import load_job

# Network, channels and size of a picture, classes, samples in a pass.
CASES = (
    ("cifar:resnet18", (3, 32, 10), 16),
    ("torchvision:resnet18", (3, 224, 1000), 4),
    ("torchvision:mobilenet_v3_small", (3, 224, 1000), 4),
    ("torchvision:vit_b_16", (3, 224, 1000), 4),
    ("quicknet", (3, 32, 10), 125),
    ("cnn", (1, 28, 10), 64),
)
WAYS = (("fp32", False), ("bf16", True))


def tried(name, shape, samples, precision, channels_last):
    """What one trial says: seconds of a pass, plain and compiled, and of making it; or why it is refused."""
    flags = {
        "model.name": name,
        "train.precision": precision,
        "train.channels_last": channels_last,
        "train.compile": True,
    }
    channels, size, classes = shape
    given = {
        "job": load_job(flags, environment={}).job.model_dump(mode="json"),
        "facts": {"channels": channels, "size": size, "classes": classes},
        "device": "cpu",
        "model": None,
        "images": torch.randn(samples, channels, size, size, generator=torch.Generator().manual_seed(0)),
    }
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "given", Path(folder) / "found"
        path.write_bytes(cloudpickle.dumps(sys.path) + cloudpickle.dumps(given))
        command = [sys.executable, "-P", "-m", "manyhands.worker.compile_trial", str(path), str(out)]
        # The trial ends where its standard input does.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"}
        ) as trial:
            trial.wait()
        return json.loads(out.read_text(encoding="utf-8"))


def main():
    """Prints a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="networks whose names hold this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    for _ in range(options.rounds):
        for name, shape, samples in CASES:
            for precision, channels_last in WAYS if options.only in name else ():
                one = tried(name, shape, samples, precision, channels_last)
                found.setdefault(f"{name} {shape[1]}x{shape[1]} {samples} {precision}", []).append(one)
                print(name, precision, one, file=sys.stderr, flush=True)
    for case, rounds in found.items():
        refused = [one["refused"] for one in rounds if "refused" in one]
        if refused:
            print(f"{case}: {refused[0]}")
            continue
        gains = sorted(one["plain"] / one["compiled"] for one in rounds)
        plain, making = (statistics.median(one[word] for one in rounds) for word in ("plain", "making"))
        spread = f"({gains[0]:.2f} to {gains[-1]:.2f})"
        print(f"{case}: {1e3 * plain:.1f} ms; compiled {statistics.median(gains):.2f} {spread}; made in {making:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
