"""What a user's own function sees at an epoch's end, and when it is called."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.core.records import EvaluationMetrics

if TYPE_CHECKING:
    from manyhands.train.trainer import Trainer


@dataclass(frozen=True)
class EpochEnd:
    """The state of a run at the end of an epoch. Modifying this object has no effect on the training.

    Attributes:
        epoch: the number of completed epochs.
        step: the number of completed updates.
        evaluation: the evaluation after this epoch, or None.
        path: the run folder.
    """

    epoch: int
    step: int
    evaluation: EvaluationMetrics | None
    path: Path


AtEpochEnd = Callable[[EpochEnd], object]


def record_epoch(trainer: "Trainer") -> None:
    """Calls the user's function on rank 0 where an epoch has just ended; what it raises ends the run."""
    progress = trainer.progress
    if trainer.at_epoch_end is None or not trainer.world.is_main or progress.step_in_epoch:
        return
    trainer.phase = "at_epoch_end"
    made = trainer.evaluated if trainer.evaluated and trainer.evaluated.step == progress.step else None
    began = time.perf_counter()
    trainer.at_epoch_end(EpochEnd(progress.epoch, progress.step, made, trainer.folder.path.absolute()))
    trainer.status_round.leave_out(time.perf_counter() - began)
    trainer.heartbeats.beat()
    trainer.phase = "train"
