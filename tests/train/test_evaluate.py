"""An evaluation: which one is the best, whose checkpoint is kept and used; and several views of each picture."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.train.evaluate import record_evaluation, view_average
from manyhands.train.loss import Evaluation
from tests.processes.updates import SMALL, built, linear


@pytest.mark.parametrize("by", ["highest top1", "highest top5", "lowest loss"])
def test_an_evaluation_with_a_nan_loss_is_never_the_best_and_one_of_an_infinite_may_be(by: str):
    given = {"count": 10, "top5": 1.0, "cells": torch.tensor([[0, 0, 9], [1, 0, 1]]), "classes": 2, "seconds": 0.1}
    last = 8 if by != "highest top5" else 6  # whose top-5 is the same
    with built(World(), linear(), {**SMALL, "train.best": by}) as trainer:
        progress, files = trainer.progress, trainer.folder.evaluations
        for step, loss, top1, best in (
            (5, math.nan, 0.9, -1),
            (6, math.inf, 0.6, 6),
            (7, math.nan, 0.9, 6),
            (8, 0.5, 0.7, last),
        ):
            progress.step, progress.owed = step, True
            assert record_evaluation(trainer, Evaluation(loss=loss, top1=top1, **given)) == (best == step)
            assert (progress.best_step, progress.owed) == (best, False)
            assert json.loads((files / "last.json").read_text())["step"] == step
            assert (files / "best.json").exists() == (step > 5)


class Flat(nn.Module):
    """The numbers themselves, so that a mean over views is a mean of pictures."""

    def forward(self, pictures):
        return pictures.flatten(1)


@given(count=st.sampled_from([2, 6]), height=st.integers(2, 5), width=st.integers(2, 5))
def test_a_mirror_image_is_the_same_to_it(count, height, width):
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(3, 2, height, width, generator=generator, dtype=torch.float64)
    there = view_average(Flat(), pictures, count).view_as(pictures)
    torch.testing.assert_close(there, there.flip(3), rtol=1e-12, atol=1e-12)
    if count == 2:
        mirrored = view_average(Flat(), pictures.flip(3), count).view_as(pictures)
        torch.testing.assert_close(there, mirrored, rtol=1e-12, atol=1e-12)


def test_six_views_of_a_line_and_one_of_what_is_no_picture():
    """Half of the weight is the picture's and its mirror image's; edges are reflected."""
    column = torch.tensor([0.0, 0.0, 1.0, 0.0]).expand(1, 1, 4, 4)
    row = view_average(Flat(), column, 6).view(4, 4)[0]
    torch.testing.assert_close(row, torch.tensor([0.25, 0.375, 0.375, 0.25]))
    vectors = torch.randn(3, 5)
    assert torch.equal(view_average(nn.Identity(), vectors, 1), vectors)
    with pytest.raises(UserError, match="shape 5 can't be mirrored"):
        view_average(nn.Identity(), vectors, 2)
