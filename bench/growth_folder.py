"""A folder of more and more pictures: seconds and memory of each process until the first update."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.growth_processes import family, figures_of
from bench.mnist_mlp import environment

CLASSES, PROCESSES, LONGEST_S = 1000, 2, 560
SIZES = (13_000, 130_000, 400_000, 1_300_000)


def linked_folder(root, pictures, pattern):
    """A folder of so many hard links to a few pictures, in 1,000 classes, named as long as ImageNet's."""
    for number in range(CLASSES):
        name = f"n{number:08}"
        (root / name).mkdir(parents=True)
        for place in range(pictures // CLASSES):
            os.link(pattern[(number + place) % len(pattern)], root / name / f"{name}_{place}.JPEG")


def measure(pictures, scratch, sample):
    """One start: seconds to the first update, and what each process holds then."""
    copies = scratch / "pictures"
    if not copies.is_dir():
        copies.mkdir()
        for path in sorted(Path(sample).glob("*/*")):
            shutil.copy(path, copies / f"{len(list(copies.iterdir()))}.JPEG")
    root = scratch / f"folder-{pictures}"
    if not root.is_dir():
        linked_folder(root, pictures, sorted(copies.iterdir()))
    return started(root, scratch)


def started(root, scratch):
    run = Path(tempfile.mkdtemp(prefix="run-", dir=scratch))
    command = [sys.executable, "-m", "manyhands", "train", str(root), "mlp", "-n", str(PROCESSES), "--quiet"]
    command += ["--batch", "8", "--out", str(run), "--set", "data.image_size=32", "--set", "data.workers=1"]
    command += ["--set", "train.evaluate_every=0", "--set", "train.precision=fp32"]
    began = time.time()
    head = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        ended = _first_step(run, head)
        return {"seconds": ended - began, "processes": figures_of(family(head.pid))}
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            head.send_signal(number)
            time.sleep(1)
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            head.kill()
        shutil.rmtree(run)


def _first_step(run, head):
    until = time.time() + LONGEST_S
    events = run / "events.jsonl"
    while time.time() < until:
        lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
        for event in map(json.loads, lines):
            if event["kind"] == "first-step":
                return event["time"]
        if head.poll() is not None:
            raise RuntimeError(head.stderr.read().decode())
        time.sleep(0.05)
    raise TimeoutError(f"no update in {LONGEST_S} s")
