"""Share of an update spent on logging, checks and checkpoints by default: the DDP introduction's job, ResNet-18.

    MANYHANDS_DATA=DIR python -m bench.own_cost [--rounds 7] [--out FILE.json]

Two processes with one thread each make blocks of updates in turns: as a run makes them, and without the records of
each update, the status round, and the check of its gradients. What comes less often is timed by itself, and counted as
often as it comes: the proof that replicas are equal, and a checkpoint. Evaluation is no part of it.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.processes.ranks import run_on_ranks

from bench.contenders.cifar_resnet import DECAY, MOMENTUM, RATE
from bench.tables import keep
from manyhands.config.load import load_job
from manyhands.core.run_folder import RunFolder
from manyhands.train.loop import updates
from manyhands.train.objects import Objects
from manyhands.train.saver import EXPECTED_S, best_save_interval
from manyhands.train.saving import save
from manyhands.train.step import Updater
from manyhands.worker.entry import _build_trainer

# Flags, updates in a block, and the share of an update's time that is asked for.
JOBS = {
    "DDP introduction": (
        {"data.name": "mnist", "model.name": "mlp", "train.batch": 64, "train.momentum": 0.0, "train.nesterov": False,
         "train.weight_decay": 0.0, "train.lr": 0.001},
        800,
        0.10,
    ),
    "ResNet-18": (
        {"data.name": "synthetic:4096x3x32x32x10", "data.augment": "none", "model.name": "resnet18",
         "train.batch": 128, "train.momentum": MOMENTUM, "train.weight_decay": DECAY, "train.lr": RATE},
        6,
        0.02,
    ),
}  # fmt: skip
ALWAYS = {"train.schedule": "constant", "train.epochs": 100_000, "train.evaluate_every": 0.0, "run.report": False}
TIMED_ALONE = 5


def as_a_run(trainer):
    """Updates one by one, with all that goes with them; checkpoints are timed alone."""
    while True:
        for update in updates(trainer, False):
            trainer.updater(update, trainer.progress.step)
            trainer.count_update()
            yield


def without(trainer):
    """The same updates alone: nothing recorded, nothing looked at."""
    for epoch in itertools.count():
        for update in trainer.feed.updates(epoch, 0):
            trainer.updater(update, trainer.progress.step)
            yield


class Unwatched:
    """Leaves out what an update looks at, as long as the block lasts."""

    def __enter__(self):
        self.before = Updater._record_pass, Updater._all_finite
        Updater._record_pass, Updater._all_finite = (lambda *_: None), (lambda _: True)

    def __exit__(self, *_):
        Updater._record_pass, Updater._all_finite = self.before


def used():
    return time.perf_counter(), time.process_time()


def timed(call):
    """Seconds of the clock and of this process's processor."""
    dist.barrier()
    began = used()
    call()
    return [now - before for now, before in zip(used(), began, strict=True)]


def measure(world, folder, job, given):
    """By what it is, a list of seconds (by the clock, of this processor), one for each round."""
    torch.set_num_threads(1)
    flags, block, _ = JOBS[job]
    if given.data_dir:
        flags = {**flags, "data.dir": given.data_dir}
    loaded = load_job({**flags, **ALWAYS, "checkpoint.every": "never"}, environment={}).job
    Path(folder, "ranks").mkdir(parents=True, exist_ok=True)
    trainer = _build_trainer(loaded, RunFolder(Path(folder)), world, {"live": Objects()})
    whole, bare = as_a_run(trainer), without(trainer)
    found = {"as a run": [], "without": []}

    def make(updates_of):
        for _ in itertools.islice(updates_of, block):
            pass

    order = random.Random(0)  # alike on all processes
    for number in range(given.rounds + 1):
        for name in order.sample(list(found), 2):
            if name == "without":
                with Unwatched():
                    seconds = timed(lambda: make(bare))
            else:
                seconds = timed(lambda: make(whole))
            if number:  # the first is for warming up
                found[name].append([one / block for one in seconds])
    found["proof"] = [timed(trainer.verify_replicas) for _ in range(TIMED_ALONE)]
    found["checkpoint"] = []
    for _ in range(TIMED_ALONE):
        trainer.progress.step += 1
        found["checkpoint"].append(timed(lambda: save(trainer)))
    found["intervals"] = [loaded.train.audit_every, EXPECTED_S]
    return found


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def tell(job, ranks):
    """Shares of an update's time, by the clock and of the processors; the same of each round, in per cent."""
    steps, fails_s = ranks[0]["intervals"]
    save_s = statistics.median(
        max(one[0] for one in each) for each in zip(*(rank["checkpoint"] for rank in ranks), strict=True)
    )
    seconds = best_save_interval(save_s, fails_s)
    asked, found = JOBS[job][2], {}
    for place, of in enumerate(("by the clock", "of a processor")):
        by = {
            name: [max(one[place] for one in each) for each in zip(*(rank[name] for rank in ranks), strict=True)]
            for name in ("as a run", "without", "proof", "checkpoint")
        }
        pairs = zip(by["as a run"], by["without"], strict=True)
        shares = [1 - alone / whole for whole, alone in pairs]
        update = statistics.median(by["as a run"])
        proof = statistics.median(by["proof"]) / (steps * update)
        saved = statistics.median(by["checkpoint"]) / seconds
        each, save_ms = statistics.median(shares), 1e3 * statistics.median(by["checkpoint"])
        say(
            f"{job}, {of}: an update {1e3 * update:.3f} ms; records and checks {each:.1%} ({min(shares):.1%} to "
            f"{max(shares):.1%}), replica check every {steps} updates {proof:.1%}, checkpoint every {seconds:.0f} s "
            f"{saved:.1%} ({save_ms:.0f} ms): {each + proof + saved:.1%}, asked {asked:.0%}"
        )
        found[f"{job}, {of}"] = [100 * (share + proof + saved) for share in shares]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("MANYHANDS_DATA", ""), help="where mnist/ lies")
    parser.add_argument("--only", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {}
    for job in given.only:
        with tempfile.TemporaryDirectory() as folder:
            found |= tell(job, run_on_ranks(measure, 2, folder, job, given, start="fork"))
    if given.out:
        keep(given.out, found, "% of an update")


if __name__ == "__main__":
    main()
