import pytest
import torch
from torchvision.models import GoogLeNetOutputs, InceptionOutputs

from manyhands.core.errors import UserError
from manyhands.models.outputs import main_and_auxiliary

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


@pytest.mark.parametrize("output", [None, {"logits": ONE}, (), (None, ONE), (ONE, "x"), 3.0])
def test_anything_else_is_refused(output: object):
    with pytest.raises(UserError, match="forward returns"):
        main_and_auxiliary(output)
