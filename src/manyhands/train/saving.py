"""Evaluating and saving, as the loop asks for them."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock

from manyhands.checkpoint.kept import prune
from manyhands.checkpoint.refuse import NotFiniteError, SaveError
from manyhands.checkpoint.save import save as commit
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.core.errors import RunError
from manyhands.core.folder import NOWHERE
from manyhands.core.going_on import going_on
from manyhands.core.phases import CLOCK, EVALUATION, SAVING
from manyhands.core.records import EvaluationDetail, EvaluationMetrics
from manyhands.core.trained import STATE_KEY
from manyhands.train.diagnose import explain_lost
from manyhands.train.evaluate import Evaluation
from manyhands.train.own_schedule import OwnScheduler
from manyhands.train.rank_state import prune_rank_states, save_rank_state
from manyhands.train.sharded_state import save_sharded
from manyhands.train.state import capture
from manyhands.train.stopping import StopSignal
from manyhands.train.trainer import Trainer

SAVED, NOT_SAVED, NOT_FINITE = 1, 0, 2


@CLOCK.within(EVALUATION)
def evaluate(trainer: Trainer, stop: StopSignal) -> bool:
    """Evaluates on all processes and records it; True when it is the best so far.

    Raises:
        Interrupted: all processes have agreed to stop; the evaluation is owed then.
    """
    progress, started = trainer.progress, time.perf_counter()
    trainer.phase = "evaluate"
    progress.owed = True
    with agreed(trainer):
        found = trainer.evaluate(lambda: trainer.heart.beat() or stop)
    best = record_evaluation(trainer, found)
    trainer.status_round.leave_out(time.perf_counter() - started)
    trainer.phase = "train"
    return best


@contextlib.contextmanager
def agreed(trainer: Trainer) -> Iterator[None]:
    """Has the network be the one that all processes have agreed on; begins with a collective."""
    trainer.synchronizer.average_buffers(trainer.progress.step)
    with trainer.synchronizer.averaged():
        yield


def record_evaluation(trainer: Trainer, found: Evaluation) -> bool:
    """Notes an evaluation of the network as it is now; True when it is the best so far."""
    progress = trainer.progress
    progress.evaluated_step, progress.owed = progress.step, False
    by = trainer.job.train.best
    best = progress.improves(by, found.figure(by.partition(" ")[2]))
    if isinstance(trainer.update.set_rates, OwnScheduler) and trainer.evaluation_asked():
        trainer.update.set_rates.evaluated(found.loss)
    trainer.evaluated = EvaluationMetrics(
        time=time.time(),
        epoch=progress.epoch,
        step=progress.step,
        count=found.count,
        loss=found.loss,
        top1=found.top1,
        top5=found.top5,
        best=best,
        classes=len(trainer.classes),
        seconds=found.seconds,
        metrics=found.metrics,
    )
    trainer.journal.metrics(trainer.evaluated)
    detail = describe(found, trainer)
    for name in ("last", "best") if best else ("last",):
        trainer.journal.detail(name, detail)
    return best


def describe(found: Evaluation, trainer: Trainer) -> EvaluationDetail:
    """An evaluation as it is kept in the run folder."""
    return EvaluationDetail(
        time=time.time(),
        epoch=trainer.progress.epoch,
        step=trainer.progress.step,
        count=found.count,
        top1=found.top1,
        top5=found.top5,
        loss=found.loss,
        classes=list(trainer.classes),
        confusion=[(row, column, count) for row, column, count in found.cells.tolist()],
        metrics=found.metrics,
    )


@CLOCK.within(SAVING)
def save(trainer: Trainer) -> None:
    """Commits a checkpoint; a full disk or the like costs the checkpoint, not the run, and is said loudly."""
    progress, started = trainer.progress, time.perf_counter()
    trainer.phase = "save"
    extra = _beside_the_network(trainer)
    outcome = SAVED
    trainer.synchronizer.average_buffers(progress.step)
    save_rank_state(trainer)
    saves = trainer.network.saves(trainer.world.rank)
    if saves or not trainer.network.runs_alone:
        with trainer.synchronizer.averaged():
            snapshot = capture(trainer.network, trainer.update.optimizer, progress, extra)
        outcome = _commit(trainer, snapshot) if saves else SAVED
    if not trainer.world.alone:
        flag = torch.tensor([outcome], device=trainer.world.device)
        dist.broadcast(flag, src=0)
        outcome = int(flag)
    if outcome == NOT_FINITE:
        raise explain_lost(trainer.network, trainer.world, trainer.update.measured)
    if outcome == SAVED:
        progress.saved_step = progress.step
        prune_rank_states(trainer)
    trainer.saves += 1
    trainer.status_round.saved()
    trainer.status_round.leave_out(time.perf_counter() - started)
    trainer.phase = "train"


def rescue(trainer: Trainer) -> bool:
    """Saves where this process has come to, without the others, one of which has failed; True when it is saved.

    All hold the same network then, so whoever has made the furthest update saves for all, and nothing that was trained
    is lost. It can't be done where processes hold pieces, or more than the network is held by each alone.
    """
    network, progress = trainer.network, trainer.progress
    held_alone = network.sharded or network.layouts or trainer.synchronizer.own
    # A scheduler of somebody else's has moved on with an update's beginning.
    under_way = trainer.update.under_way
    between = under_way.in_pieces or (under_way.begun and isinstance(trainer.update.set_rates, OwnScheduler))
    if held_alone or between or not progress.step or trainer.folder is NOWHERE:
        return False
    under_way.undo()
    # The others may have failed before all could agree that it is to be made.
    progress.owed |= trainer.evaluation_due() and progress.evaluated_step != progress.step
    folder = trainer.folder.checkpoints
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = capture(network, trainer.update.optimizer, progress, _beside_the_network(trainer))
    snapshot.state["saved_step"] = progress.step
    with FileLock(trainer.folder.ranks / "rescue.lock", mode=0o600):  # a second one finds that it is done
        path = commit(folder, progress.step, snapshot)
    trainer.journal.event("saved", path.name, progress.step)
    return True


def _beside_the_network(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint holds beside the network, its optimizer and how far they have come."""
    extra: dict[str, Any] = {
        "job": trainer.digest,
        "classes": list(trainer.classes),
        "model": trainer.job.model.name,
        STATE_KEY: trainer.trained.model_dump(mode="json"),
        **trainer.noted(),
        "sync": {**asdict(trainer.sync), "processes": trainer.world.size},
        "most_in_a_pass": trainer.feed.cut.most,
    }
    if trainer.settle_shares:
        extra["shares"] = trainer.feed.samples_of_each()
    if trainer.update.gradients.scaler:
        extra["scaler"] = trainer.update.gradients.scaler.state_dict()
    if isinstance(trainer.update.set_rates, OwnScheduler):
        extra["schedule"] = trainer.update.set_rates.saved()
    return extra


def save_last(trainer: Trainer) -> None:
    """Saves where a run ends: what isn't saved now is lost, so here a failure is the run's.

    Raises:
        RunError: there is no checkpoint of the run's last step; on all processes alike.
    """
    save(trainer)
    if trainer.progress.saved_step != trainer.progress.step:
        raise RunError(
            f"the run came to step {trainer.progress.step}, which could not be saved; the warning before says why",
            str(trainer.folder.checkpoints),
            (f"make room, then go on from the last checkpoint: {going_on(trainer.folder.path)}",),
        )


def _commit(trainer: Trainer, snapshot: Snapshot) -> int:
    """Writes the checkpoint; says how that went, so that all processes can act alike."""
    progress, folder, network = trainer.progress, trainer.folder.checkpoints, trainer.network
    # What is saved says of itself that it is.
    snapshot.state["saved_step"] = progress.step
    started = time.perf_counter()
    try:
        if network.layouts:
            pieces = trainer.job.checkpoint.pieces
            path = save_sharded(folder, progress.step, snapshot, network, trainer.world, pieces=pieces)
        else:
            path = commit(folder, progress.step, snapshot)
    except SaveError as error:
        trainer.journal.event("warning", f"no checkpoint at step {progress.step}: {error.what}", progress.step)
        return NOT_SAVED
    except NotFiniteError:
        return NOT_FINITE
    if not trainer.world.is_main:
        return SAVED
    best = folder / f"step-{progress.best_step:08d}"
    prune(folder, trainer.job.checkpoint.keep, best if best.is_dir() else None)
    trainer.journal.event("saved", path.name, progress.step, seconds=time.perf_counter() - started)
    return SAVED
