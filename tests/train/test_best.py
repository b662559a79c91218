"""Which evaluation is the best, whose checkpoint is kept and used."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.train.evaluate import record_evaluation
from manyhands.train.loss import Evaluation
from manyhands.train.state import Progress


def recorded(progress: Progress, loss: float, top1: float, by: str = "highest top1") -> tuple[bool, list[str]]:
    """Records an evaluation of a run that is at `progress`; returns whether it is the best, and the files written."""
    written: list[str] = []
    nothing: Any = SimpleNamespace(set_rates=None, classes=("a", "b"), evaluated=None)
    journal = SimpleNamespace(metrics=lambda _: None, detail=lambda name, _: written.append(name))
    job = SimpleNamespace(train=SimpleNamespace(best=by))
    trainer: Any = SimpleNamespace(
        progress=progress, job=job, updater=nothing, trained=nothing, observed=nothing, journal=journal
    )
    cells = torch.tensor([[0, 0, 9], [1, 0, 1]])
    found = Evaluation(count=10, loss=loss, top1=top1, top5=1.0, cells=cells, classes=2, seconds=0.1)
    return record_evaluation(trainer, found), written


@pytest.mark.parametrize("by", ["highest top1", "highest top5", "lowest loss"])
def test_an_evaluation_with_a_nan_loss_is_never_the_best(by: str):
    progress = Progress(step=5)
    assert recorded(progress, math.nan, 0.9, by) == (False, ["last"])
    assert (progress.best_step, progress.best_figure, progress.owed) == (-1, None, False)
    progress.step = 6
    assert recorded(progress, 0.5, 0.6, by) == (True, ["last", "best"])
    progress.step = 7
    assert recorded(progress, math.nan, 0.9, by) == (False, ["last"])
    assert progress.best_step == 6


def test_the_highest_accuracy_is_the_best_even_if_its_loss_is_infinite():
    progress = Progress(step=1)
    assert recorded(progress, math.inf, 0.9) == (True, ["last", "best"])
