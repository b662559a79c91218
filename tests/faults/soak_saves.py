"""Kills while checkpoints are written: is ever one loaded that isn't what was saved?

    python -m tests.faults.soak_saves kills --count 200            SIGKILL at random moments of saving

Whole checkpoints and those in pieces in turn. Needs no root. The last line is JSON; --json FILE keeps it. Ends with 1
where a promise doesn't hold.
"""

import argparse
import functools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from manyhands.checkpoint import files
from manyhands.checkpoint.describe import NetworkLayout
from manyhands.checkpoint.folders import newest_checkpoint, prune_checkpoints
from manyhands.checkpoint.read import load_checkpoint
from manyhands.checkpoint.write import save_unsharded
from manyhands.core.mesh import Mesh, TensorLayout
from manyhands.parallel.network import ParallelNetwork
from manyhands.train.saver import SaveOutcome, Saver
from manyhands.train.state import Progress, capture
from tests.checkpoint.cuts import save_one_by_one

ROWS, COLUMNS = 200, 300
CUT = NetworkLayout(Mesh((("a", 2),)), {"weight": TensorLayout((ROWS, COLUMNS), (ROWS, COLUMNS), ((0, (0,)),))})


class Trained:
    """Stands for a run: all that it holds is its step's number."""

    def __init__(self):
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.network = ParallelNetwork(linear)
        self.optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)
        linear.weight.grad = torch.zeros_like(linear.weight)
        self.optimizer.step()

    @torch.no_grad()
    def be(self, step):
        """Has the weights and the optimizer's state of a step."""
        weight = self.network.model.weight
        for tensor in (weight, self.optimizer.state[weight]["momentum_buffer"]):
            tensor.fill_(step)

    def captured(self, step):
        """A copy, as training makes one."""
        self.be(step)
        return capture(self.network, self.optimizer, Progress(step=step), {})


def is_of(snapshot, step):
    """Whether all that was loaded is what was saved at this step."""
    tensors = [*snapshot.model.values(), snapshot.optimizer["state"]["weight"]["momentum_buffer"]]
    return snapshot.state["step"] == step and all(bool((tensor == step).all()) for tensor in tensors)


def write(folder, step, snapshot):
    """As training's own thread does, in pieces every other time."""
    if step % 2:
        save_unsharded(folder, step, snapshot)
    else:
        save_one_by_one(folder, snapshot, CUT)
    prune_checkpoints(folder, 2, None)
    return SaveOutcome()


def save_for_ever(folder, step, tell):
    """Saves beside what goes on, and says which step is saved, and how long that took."""
    trained, saver = Trained(), Saver()
    while True:
        step, began = step + 1, time.monotonic()
        saver.start_save(step, functools.partial(write, folder, step, trained.captured(step)))
        trained.be(-step)
        saver.end_save()
        print(step, time.monotonic() - began, file=tell, flush=True)


def kill_a_save(folder, step, draw):
    """Has a fork save from `step` on and kills it; the steps that it said were saved, with the seconds of each."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(folder, step, os.fdopen(theirs, "w"))
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(theirs)
    with os.fdopen(ours) as reported:
        lines = [reported.readline()]
        if lines[0]:
            time.sleep(draw.uniform(0, 2 * float(lines[0].split()[1])))
            os.kill(child, signal.SIGKILL)
        lines += reported
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the saving process failed"
    return {int(number): float(seconds) for number, seconds in map(str.split, lines)}


def kills(folder, *, count, seed):
    """After each kill the newest is whole, and no older than the last that was saved; the others are whole too."""
    draw, found, took, step = random.Random(seed), Counter(), [], 2
    for first in (1, 2):  # what a save imports is imported once, not by each fork
        write(folder, first, Trained().captured(first))
    for _ in range(count):
        saved = kill_a_save(folder, step, draw)
        took += saved.values()
        path, passed_over = newest_checkpoint(folder)
        step = files.step_of(path) if path else 0
        left = [int(entry.name.split("-")[2]) for entry in folder.iterdir() if files.is_temporary(entry)]
        found["hit_a_save"] += any(number > step for number in left)
        found["hit_a_deletion"] += any(number <= step for number in left)
        found["older_than_was_saved"] += step < max(saved)
        found["torn"] += len(passed_over)
        for one in files.step_folders(folder):
            found["loaded"] += 1
            found["wrong"] += not is_of(load_checkpoint(one), files.step_of(one))
    prune_checkpoints(folder, 2, None)
    found["left_over"] = sum(files.is_temporary(entry) for entry in folder.iterdir())
    bad = {name: found[name] for name in ("wrong", "torn", "older_than_was_saved", "left_over")}
    holds = not any(bad.values()) and found["hit_a_save"] > 0
    return {"kills": count, **found, **bad, "save_ms": 1000 * statistics.median(took), "holds": holds}


def arguments(description, *what, count):
    """A parser of the arguments that both scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=what)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    return parser


def report(given, found):
    """Prints and keeps what was found; the exit code."""
    text = json.dumps({"what": given.what, "seed": given.seed, **found})
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    return int(not found["holds"])


def main():
    """Does it, and says so."""
    given = arguments(__doc__, "kills", count=200).parse_args()
    torch.set_num_threads(1)  # a process with more of torch's own can't be forked
    with tempfile.TemporaryDirectory(prefix="manyhands-saves-") as folder:
        return report(given, kills(Path(folder), count=given.count, seed=given.seed))


if __name__ == "__main__":
    sys.exit(main())
