"""The planner for more and more devices: seconds and memory of a search without measuring."""

import os
import subprocess
import sys
import tempfile
import time

from bench.mnist_mlp import environment

SIZES = (2, 16, 128, 1024)


def measure(devices, scratch):
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        command = [
            sys.executable,
            "-m",
            "manyhands",
            "plan",
            "synthetic:5000x3x32x32x10",
            "resnet18",
            "-n",
            str(devices),
        ]
        command += ["--batch", "1024", "--no-measure", "--device-model", "a100", "--out", f"{folder}/plan.json"]
        return timed(command)


def timed(command):
    """Seconds on the clock and of the processor, and the most memory of a command's largest process."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(log.read().decode()[-2000:])
    spent = {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss / 1024}
    return {"seconds": time.monotonic() - began, **spent}
