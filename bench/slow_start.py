"""How long `manyhands train` takes to its first step on slow links, once all have imported torch and met."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
# 11.7 million parameters, as in the other tables.
JOB = ["synthetic:240x3x32x32x1000", "torchvision:resnet18", "--batch", "24", "--epochs", "1",
       "--set", "run.report=false", "--set", "train.max_steps=1", "--set", "checkpoint.every=never"]  # fmt: skip
LONGEST_S = 600


def first_steps(lab, given):
    """Each way at each rate, in turns; a line of JSON for each."""
    for number in range(given.rounds):
        for rate in given.rates.split(","):
            for method in given.methods.split(","):
                for host in lab.hosts:
                    lab.rate(host, None if rate == "none" else rate)
                record = {"first_step_of": method, "rate": rate, "round": number, **first_step(lab, method)}
                given.out.parent.mkdir(parents=True, exist_ok=True)
                with given.out.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(record) + "\n")
                print(record, flush=True)


def first_step(lab, method):
    """Seconds from the command, and from when all have imported torch and met, to the first finished step."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        init = f"tcp://{lab.address(1)}:{probe.getsockname()[1]}"
        name, *more = method.split(":")
        how = ["--sync", name, *(["--set", f"sync.codec={more[0]}"] if more else [])]
        how += ["--set", f"sync.every={more[1]}"] if len(more) > 1 else []
        began = time.time()
        together(
            lab,
            lambda rank: [
                sys.executable, "-m", "manyhands", "train", *JOB, *how, "--out", f"{folder}/run", "--init", init,
                "--world-size", str(len(lab.hosts)), "--rank", str(rank),
            ],
            environment,
        )  # fmt: skip
        lines = (Path(folder) / "run" / "events.jsonl").read_text().splitlines()
        times = {event["kind"]: event["time"] for event in reversed([json.loads(line) for line in lines])}
    return {
        "from_command_s": times["first-step"] - began,
        "first_step_s": times["first-step"] - times["started"],
        "load": os.getloadavg()[0],
    }


def together(lab, command, environment):
    """Runs a command in all hosts at once to its good end."""
    waiting = [lab.exec(host, command(host - 1), env=environment, stdout=subprocess.DEVNULL) for host in lab.hosts]
    try:
        codes = [process.wait(LONGEST_S) for process in waiting]
    finally:
        for process in waiting:
            process.kill()
    if any(codes):
        raise RuntimeError(f"exit codes {codes}; what was said is above")
