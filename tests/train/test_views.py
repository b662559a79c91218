"""An evaluation over several views of each picture."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manyhands.core.errors import UserError
from manyhands.train.evaluate import view_average

CHECKED = st.sampled_from([2, 6])


def _pictures(height, width):
    return torch.randn(3, 2, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Flat(nn.Module):
    """The numbers themselves, so that a mean over views is a mean of pictures."""

    def forward(self, pictures):
        return pictures.flatten(1)


@given(count=CHECKED, height=st.integers(2, 5), width=st.integers(2, 5))
def test_a_mirror_image_is_the_same_to_it(count, height, width):
    pictures = _pictures(height, width)
    there = view_average(Flat(), pictures, count).view_as(pictures)
    mirrored = view_average(Flat(), pictures.flip(3), count).view_as(pictures)
    torch.testing.assert_close(there, there.flip(3), rtol=1e-12, atol=1e-12)
    if count == 2:
        torch.testing.assert_close(there, mirrored, rtol=1e-12, atol=1e-12)


@given(count=CHECKED, value=st.floats(-5, 5))
def test_weights_add_up_to_one(count, value):
    same = torch.full((2, 1, 4, 4), value, dtype=torch.float64)
    torch.testing.assert_close(view_average(Flat(), same, count), same.flatten(1))


def test_six_views_of_a_line():
    """Half of the weight is the picture's and its mirror image's; edges are reflected."""
    column = torch.tensor([0.0, 0.0, 1.0, 0.0]).expand(1, 1, 4, 4)
    row = view_average(Flat(), column, 6).view(4, 4)[0]
    torch.testing.assert_close(row, torch.tensor([0.25, 0.375, 0.375, 0.25]))


def test_what_is_no_picture_has_one_view():
    vectors = torch.randn(3, 5)
    assert torch.equal(view_average(nn.Identity(), vectors, 1), vectors)
    with pytest.raises(UserError, match="shape 5 can't be mirrored"):
        view_average(nn.Identity(), vectors, 2)
