"""The order of events of a whole run. No tensor maths here: read it first."""

import math
import time
from collections.abc import Iterator

from manyhands.core.records import StepMetrics
from manyhands.train.agree import Verdict
from manyhands.train.diagnose import explain_lost
from manyhands.train.feed import Update
from manyhands.train.keep import evaluate, save, save_last
from manyhands.train.optimize import learning_rate
from manyhands.train.parts import Parts
from manyhands.train.pth_tar import write_pth_tar
from manyhands.train.stopping import StopSignal, listening


def fit(parts: Parts) -> str:
    """Trains until the job is done or somebody asks to stop.

    Returns:
        "finished", or "stopped" with everything saved.
    """
    progress = parts.progress
    with listening() as stop:
        parts.agreement.reset(progress.step)
        parts.epoch_mean.whole = progress.step_in_epoch == 0
        while not parts.done():
            for update in _waited_for(parts):
                parts.update(update, progress.step)
                progress.advance(parts.feed.order.steps_per_epoch)
                if parts.done():
                    parts.agreeing.finish(progress.step)
                if _attend(parts, stop):
                    return "stopped"
                if parts.done():
                    break
        if progress.evaluated_step != progress.step:
            evaluate(parts)
        if progress.saved_step != progress.step or not parts.saves:
            save_last(parts)
    return "finished"


def _waited_for(parts: Parts) -> Iterator[Update]:
    """The rest of the current epoch's updates; counts the time spent waiting for them."""
    updates = parts.feed.updates(parts.progress.epoch, parts.progress.step_in_epoch)
    while True:
        started = time.perf_counter()
        update = next(updates, None)
        parts.agreement.waiting_s += time.perf_counter() - started
        if update is None:
            return
        yield update


def _attend(parts: Parts, stop: StopSignal) -> bool:
    """What may follow an update: agreeing, proving, evaluating, saving. True when the run is to stop."""
    progress, order = parts.progress, parts.feed.order
    epoch_ends = progress.step_in_epoch == 0
    audit = parts.job.train.audit_every
    if progress.step == 1 or (audit and progress.step % audit == 0):
        parts.prove_replicas()
    evaluation = parts.evaluation_due()
    forced = epoch_ends or evaluation or parts.done() or progress.step == 1 or parts.line_due()
    if not parts.agreement.due(progress.step, force=forced):
        if parts.save_due_by_step():
            save(parts)
        return False
    extra = parts.watcher.mine if parts.watcher else None
    verdict = parts.agreement.agree(parts.update.measured, progress.step, stop=bool(stop), extra=extra)
    if not math.isfinite(verdict.loss):
        raise explain_lost(parts.network, parts.world, parts.update.measured.first_bad)
    _record(parts, verdict, order.steps_per_epoch)
    if parts.watcher:
        parts.heed(verdict.extra, verdict.waited_s)
    if verdict.stop:
        parts.journal.event("stopping", "saving", progress.step)
    improved = evaluation and not verdict.stop and evaluate(parts)
    if epoch_ends and not verdict.stop:
        write_pth_tar(parts, best=improved)
    if verdict.stop:
        save_last(parts)
    elif verdict.save or improved or parts.save_due_by_step():
        save(parts)
    return verdict.stop


def _record(parts: Parts, verdict: Verdict, steps_per_epoch: int) -> None:
    progress, options = parts.progress, parts.job.train
    if progress.step == 1:
        parts.journal.event("first-step", step=1)
    if not verdict.samples:
        return
    parts.epoch_mean.add(verdict)
    epoch_loss, epoch_top1 = parts.epoch_mean.take() if progress.step_in_epoch == 0 else (None, None)
    parts.journal.metrics(
        StepMetrics(
            time=time.time(),
            epoch=progress.epoch,
            step=progress.step,
            step_in_epoch=progress.step_in_epoch,
            steps_per_epoch=steps_per_epoch,
            total_steps=parts.total_steps,
            loss=verdict.loss,
            top1=verdict.top1,
            learning_rate=learning_rate(options, progress.step - 1, steps_per_epoch),
            images_per_s=verdict.samples / verdict.seconds,
            samples=verdict.samples,
            data_share=verdict.data_share,
            saved_step=progress.saved_step,
            epoch_loss=epoch_loss,
            epoch_top1=epoch_top1,
            asked=parts.line_due(),
        )
    )
    own = f"loss={verdict.own_loss:.4f} acc={100 * verdict.own_top1:.1f}" if verdict.own_samples else "loss=- acc=-"
    of_epoch = f" epoch_loss={epoch_loss:.4f}" if epoch_loss is not None else ""
    place = f"epoch={(progress.step - 1) // steps_per_epoch + 1} step={progress.step}/{parts.total_steps}"
    parts.journal.line(
        f"rank={parts.world.rank} {place} {own} samples={verdict.own_samples} all_loss={verdict.loss:.4f}{of_epoch}"
    )
