"""The test on samples that decided nothing: once, when training is over, with the last and with the best weights."""

from pathlib import Path

from manyhands.checkpoint import files
from manyhands.checkpoint.files import verify
from manyhands.core.errors import UserError
from manyhands.core.files import read_object
from manyhands.core.phases import CLOCK, EVALUATION
from manyhands.core.quantities import percentage
from manyhands.core.records import EvaluationDetail
from manyhands.parallel.plain import broadcast_plain
from manyhands.train.evaluate import Interrupted
from manyhands.train.recover import find_state
from manyhands.train.saving import describe
from manyhands.train.state import restore
from manyhands.train.stopping import StopSignal
from manyhands.train.trainer import Trainer

BEST, LAST = "test-best", "test-last"


@CLOCK.within(EVALUATION)
def test_once(trainer: Trainer, stop: StopSignal) -> None:
    """Evaluates what was held out, unless that was done for these weights before; a collective.

    The network holds the last weights before and after it, whatever happens in between.

    Raises:
        Interrupted: all processes have agreed to stop; the test is made when the run goes on.
    """
    if trainer.test is None or not broadcast_plain(not _is_done(trainer), trainer.world):
        return
    trainer.phase = "evaluate"
    with trainer.synchronizer.averaged():
        last = describe(trainer.test(lambda: stop), trainer)
    best = _of_the_best(trainer, last, stop)
    trainer.journal.detail(LAST, last)
    message = f"test on {last.count:,} held-out samples: "
    of_last = percentage(last.top1, 2)
    if best:
        trainer.journal.detail(BEST, best)
        of_best = percentage(best.top1, 2)
        message += f"top-1 {of_best}% with the best weights (step {best.step}), {of_last}% with the last weights"
    else:
        message += f"top-1 {of_last}% with the last weights"
    step = trainer.progress.step
    trainer.journal.event("tested", message, step, best=best.top1 if best else None, last=last.top1)
    trainer.phase = "train"


def _is_done(trainer: Trainer) -> bool:
    """True where this process finds the records of a test with the weights of this run's end."""
    wanted = {BEST: trainer.progress.best_step, LAST: trainer.progress.step}
    records = {name: trainer.folder.evaluations / f"{name}.json" for name in wanted}
    return all(
        file.is_file() and (read_object(file) or {}).get("step") == wanted[name] for name, file in records.items()
    )


def _of_the_best(trainer: Trainer, last: EvaluationDetail, stop: StopSignal) -> EvaluationDetail | None:
    """The test with the best weights, which are read from their checkpoint; None where that can't be read."""
    progress, folder = trainer.progress, trainer.folder.checkpoints
    if progress.best_step == progress.step:
        return last
    paths = [folder / files.step_name(step) for step in (progress.best_step, progress.step)]
    if progress.best_step < 0 or not broadcast_plain(all(map(_is_sound, paths)), trainer.world):
        step = progress.step
        trainer.journal.event("warning", "the best checkpoint can't be read; the test uses the last weights", step)
        return None
    assert trainer.test is not None
    epoch = _load(trainer, progress.best_step)
    try:
        found = describe(trainer.test(lambda: stop), trainer)
    except Interrupted:
        _load(trainer, progress.step)  # what is saved next are the last weights
        raise
    _load(trainer, progress.step)
    return found.model_copy(update={"step": progress.best_step, "epoch": epoch})


def _is_sound(path: Path) -> bool:
    try:
        verify(path)
    except UserError:
        return False  # which is the answer
    return True


def _load(trainer: Trainer, step: int) -> int:
    """Gives the network the weights that were saved at a step; the epoch of that. A collective."""
    path = trainer.folder.checkpoints / files.step_name(step)
    options = trainer.job.checkpoint.model_copy(update={"resume": str(path)})
    job = trainer.job.model_copy(update={"checkpoint": options})
    found = find_state(job, trainer.folder, trainer.world, in_pieces=bool(trainer.network.layouts))
    assert found is not None
    return restore(found.snapshot, trainer.network, None, where=str(path), source=found.source)[0].epoch
