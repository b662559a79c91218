"""What an all-reduce costs through ssh, beside the same on the network that the ssh goes through.

`python -m bench.through_ssh [--rounds 5]`; needs root, for the two hosts are network namespaces with real sshd. One
process on each; both ways take turns in each round.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.network.lab import Lab

SIZES = {"4 KiB": (1 << 10, 200), "1 MiB": (1 << 18, 30), "64 MiB": (1 << 24, 5)}
SCRIPT = f"""
import statistics, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for name, (count, times) in {SIZES!r}.items():
    tensor, took = torch.ones(count), []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        took.append(time.perf_counter() - began)
        assert tensor[0].item() > 1
        tensor.fill_(1)
    print(name, "took", statistics.median(took) * 1000, "ms", flush=True)
dist.destroy_process_group()
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    took = {(way, size): [] for way in ("eth0", "ssh") for size in SIZES}
    with tempfile.TemporaryDirectory() as folder, Lab(hosts=2) as lab:
        os.chdir(folder)
        Path("reduce.py").write_text(SCRIPT)
        for number in range(rounds):
            for way in ("eth0", "ssh")[:: 1 if number % 2 else -1]:
                for size, milliseconds in all_reduces(lab, way).items():
                    took[way, size].append(milliseconds)
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}: {took}", flush=True)
    for size in SIZES:
        network, ssh = took["eth0", size], took["ssh", size]
        ratios = [one / other for one, other in zip(ssh, network, strict=True)]
        print(f"| {size} | {told(network)} | {told(ssh)} | {told(ratios)} |")


def all_reduces(lab, way):
    words = [
        sys.executable,
        "-m",
        "manyhands",
        "launch",
        "reduce.py",
        "--hosts",
        ",".join(lab.names),
        "--interface",
        way,
    ]
    done = subprocess.run([*words, "--cluster.ssh", lab.ssh], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return {size: float(re.search(f"{size} took ([0-9.]+) ms", done.stdout)[1]) for size in SIZES}


def told(values):
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
