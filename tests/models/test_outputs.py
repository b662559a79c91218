import pytest
import torch
from torchvision.models import GoogLeNetOutputs, InceptionOutputs

from manyhands.core.errors import UserError
from manyhands.models.interface import main_and_auxiliary

ONE, TWO, THREE = torch.zeros(2, 3), torch.ones(2, 3), torch.full((2, 3), 2.0)


@pytest.mark.parametrize(
    ("output", "weights"),
    [
        (ONE, []),
        (GoogLeNetOutputs(ONE, TWO, THREE), [0.3, 0.3]),
        (GoogLeNetOutputs(ONE, None, None), []),
        (InceptionOutputs(ONE, TWO), [0.4]),
        ((ONE, TWO), [0.4]),
        ([ONE], []),
    ],
)
def test_the_first_output_is_the_main_one(output: object, weights: list[float]):
    main, heads = main_and_auxiliary(output)
    assert main is ONE
    assert [weight for _, weight in heads] == weights


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (None, "nothing"),
        ({"logits": ONE}, r"a dict of logits: a tensor \[2, 3\]"),
        ((), "a tuple"),
        ((None, ONE), r"a tuple of nothing, a tensor \[2, 3\]"),
        ((ONE, "x"), r"a tuple of a tensor \[2, 3\], a str"),
        (3.0, "a float"),
        ((ONE, torch.zeros(2, 64, 7, 7)), r"a tuple of a tensor \[2, 3\], a tensor \[2, 64, 7, 7\]"),
        ((ONE, torch.zeros(2)), r"a tuple of a tensor \[2, 3\], a tensor \[2\]"),
        (torch.zeros(2, 3, 7, 7), r"a tensor \[2, 3, 7, 7\]"),
    ],
)
def test_anything_else_is_refused_with_what_it_is(output: object, shown: str):
    with pytest.raises(UserError, match=f"forward returns {shown}\n") as raised:
        main_and_auxiliary(output)
    assert "[N, classes]" in raised.value.hints[0]
