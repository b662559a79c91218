"""Evaluating and saving, as the loop asks for them."""

import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from manyhands.checkpoint.save import NotFiniteError, SaveError, prune
from manyhands.checkpoint.save import save as commit
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.core.errors import RunError
from manyhands.core.records import EvaluationDetail, EvaluationMetrics
from manyhands.core.trained import STATE_KEY
from manyhands.train.cut_state import save_cut
from manyhands.train.diagnose import explain_lost
from manyhands.train.evaluate import Evaluation
from manyhands.train.own_state import prune_own, save_own
from manyhands.train.parts import Parts
from manyhands.train.state import capture

SAVED, NOT_SAVED, NOT_FINITE = 1, 0, 2


def evaluate(parts: Parts) -> bool:
    """Evaluates on all processes and records it; True when it is the best so far."""
    progress, started = parts.progress, time.perf_counter()
    parts.phase = "evaluate"
    parts.agreeing.agree_on_buffers(progress.step)
    with parts.agreeing.agreed():
        found = parts.evaluate()
    progress.evaluated_step = progress.step
    best = found.top1 > progress.best_top1
    if best:
        progress.best_top1, progress.best_step = found.top1, progress.step
    parts.journal.metrics(
        EvaluationMetrics(
            time=time.time(),
            epoch=progress.epoch,
            step=progress.step,
            count=found.count,
            loss=found.loss,
            top1=found.top1,
            top5=found.top5,
            best=best,
            seconds=found.seconds,
        )
    )
    detail = describe(found, parts)
    for name in ("last", "best") if best else ("last",):
        parts.journal.detail(name, detail)
    parts.agreement.leave_out(time.perf_counter() - started)
    parts.phase = "train"
    return best


def describe(found: Evaluation, parts: Parts) -> EvaluationDetail:
    """An evaluation as it is kept in the run folder."""
    return EvaluationDetail(
        time=time.time(),
        epoch=parts.progress.epoch,
        step=parts.progress.step,
        count=found.count,
        top1=found.top1,
        top5=found.top5,
        loss=found.loss,
        classes=list(parts.classes),
        confusion=[(row, column, count) for row, column, count in found.cells.tolist()],
    )


def save(parts: Parts) -> None:
    """Commits a checkpoint; a full disk or the like costs the checkpoint, not the run, and is said loudly."""
    progress, started = parts.progress, time.perf_counter()
    parts.phase = "save"
    extra = {"job": parts.digest, "classes": list(parts.classes), "model": parts.job.model.name}
    extra[STATE_KEY] = parts.trained.model_dump(mode="json")
    extra["sync"] = {**asdict(parts.sync), "processes": parts.world.size}
    if parts.update.scaler:
        extra["scaler"] = parts.update.scaler.state_dict()
    outcome = SAVED
    parts.agreeing.agree_on_buffers(progress.step)
    save_own(parts)
    if parts.network.sharded or parts.network.cutting or parts.world.speaks:
        with parts.agreeing.agreed():
            snapshot = capture(parts.network, parts.update.optimizer, progress, extra)
        # The processes that hold a cut network write it together.
        outcome = _commit(parts, snapshot) if parts.network.cutting or parts.world.speaks else SAVED
    if not parts.world.alone:
        flag = torch.tensor([outcome], device=parts.world.device)
        dist.broadcast(flag, src=0)
        outcome = int(flag)
    if outcome == NOT_FINITE:
        raise explain_lost(parts.network, parts.world, parts.update.measured.first_bad)
    if outcome == SAVED:
        progress.saved_step = progress.step
        prune_own(parts)
    parts.saves += 1
    parts.agreement.saved()
    parts.agreement.leave_out(time.perf_counter() - started)
    parts.phase = "train"


def save_last(parts: Parts) -> None:
    """Saves where a run ends: what isn't saved now is lost, so here a failure is the run's.

    Raises:
        RunError: there is no checkpoint of the run's last step; on all processes alike.
    """
    save(parts)
    if parts.progress.saved_step != parts.progress.step:
        raise RunError(
            f"the run came to step {parts.progress.step}, which could not be saved; the warning before says why",
            str(parts.folder.checkpoints),
            (f"make room, then go on from the last checkpoint: manyhands resume {parts.folder.path}",),
        )


def _commit(parts: Parts, snapshot: Snapshot) -> int:
    """Writes the checkpoint; says how that went, so that all processes can act alike."""
    progress, folder, cutting = parts.progress, parts.folder.checkpoints, parts.network.cutting
    # What is saved says of itself that it is.
    snapshot.state["saved_step"] = progress.step
    started = time.perf_counter()
    try:
        if cutting:
            pieces = parts.job.checkpoint.pieces
            path = save_cut(folder, progress.step, snapshot, cutting, parts.world, pieces=pieces)
        else:
            path = commit(folder, progress.step, snapshot)
    except SaveError as error:
        parts.journal.event("warning", f"no checkpoint at step {progress.step}: {error.what}", progress.step)
        return NOT_SAVED
    except NotFiniteError:
        return NOT_FINITE
    if not parts.world.speaks:
        return SAVED
    best = folder / f"step-{progress.best_step:08d}"
    prune(folder, parts.job.checkpoint.keep, best if best.is_dir() else None)
    parts.journal.event("saved", path.name, progress.step, seconds=time.perf_counter() - started)
    return SAVED
