"""Records what every process spent its time on."""

import time

from manyhands.core.phases import CLOCK, PHASES
from manyhands.core.records import PhaseMetrics
from manyhands.core.run_folder import NOWHERE
from manyhands.parallel.plain import gather_plain
from manyhands.train.trainer import Trainer


def record_time(trainer: Trainer) -> None:
    """Records all processes' seconds by phase since the last call; a collective, unless nothing is recorded."""
    if trainer.folder is NOWHERE:
        return
    progress = trainer.progress
    own = [round(seconds, 6) for seconds in (*CLOCK.take(), CLOCK.take_queued())]
    *columns, queued = zip(*gather_plain(own, trainer.world), strict=True)
    trainer.journal.metrics(
        PhaseMetrics(
            time=time.time(),
            epoch=max(1, progress.epoch + bool(progress.step_in_epoch)),
            step=progress.step,
            seconds={phase: list(column) for phase, column in zip(PHASES, columns, strict=True)},
            queued_s=list(queued),
        )
    )
