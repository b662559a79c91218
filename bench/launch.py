"""How long `manyhands launch` takes to the first step on three hosts, beside what torch's import takes on them.

`python -m bench.launch [--rounds 3] [--times 0]`; needs root, for the hosts are network namespaces with real sshd.
With --times N it also starts and stops a job N times and says what is left behind.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.network.lab import Lab

JOB = ["digits", "mlp", "--epochs", "100000", "--set", "train.evaluate_every=1000", "--set", "run.report=false",
       "--set", "run.log_every_s=0.05"]  # fmt: skip
IMPORT = (
    "import torch, torchvision, torch.distributed.elastic.agent.server.local_elastic_agent, manyhands.worker.preload"
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Lab(hosts=3, environment={"TMPDIR": f"{folder}/tmp"}) as lab:
        os.environ["TMPDIR"] = f"{folder}/tmp"
        Path(os.environ["TMPDIR"]).mkdir()
        for number in range(options.rounds):
            imported = import_seconds(lab)
            first = launch(lab, Path(folder) / f"run{number}")
            words = f"import on 3 hosts {imported:.1f} s, launch to first step {first:.1f} s"
            print(f"{words}, beyond it {first - imported:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
        before = left(lab)
        for number in range(options.times):
            launch(lab, Path(folder) / f"again{number}")
            if number % 10 == 9:
                print(f"{number + 1} starts and stops, left: {left(lab) - before or 'nothing'}", flush=True)


def import_seconds(lab):
    """Torch's own import, on all hosts at once."""
    started = time.monotonic()
    waiting = [lab.exec(host, [sys.executable, "-c", IMPORT]) for host in lab.hosts]
    for process in waiting:
        process.wait()
    return time.monotonic() - started


def launch(lab, out):
    """Seconds from the command to the first step; the job is stopped then."""
    command = [
        sys.executable,
        "-m",
        "manyhands",
        "launch",
        *JOB,
        "--hosts",
        ",".join(lab.names),
        "--cluster.ssh",
        lab.ssh,
    ]
    began, started = time.time(), time.monotonic()
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (found := first_step(out)):
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() - started < 300, "no step in 300 s"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 75
    return found - began


def first_step(out):
    """When the first step was recorded."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((json.loads(line)["time"] for line in lines if '"kind":"step"' in line), None)


def left(lab):
    """Processes and open ports in the hosts, and files of ours beside the runs."""
    found = {f"n{host} process {pid}" for host in lab.hosts for pid in lab.processes(host)}
    found |= {f"n{host} {line}" for host in lab.hosts for line in lab.run(host, ["ss", "-ltnH"]).splitlines()}
    return found | {str(path) for path in Path(os.environ["TMPDIR"]).iterdir()}


if __name__ == "__main__":
    main()
