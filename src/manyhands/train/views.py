"""Outputs of a network averaged over views of each picture: itself, its mirror image, both shifted by a pixel.

What Jordan 2024 (arXiv:2404.00498) evaluates with; the shifted views have half of the weight.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from manyhands.core.errors import UserError
from manyhands.models.outputs import main_and_auxiliary


def averaged(model: nn.Module, pictures: Tensor, count: int) -> Tensor:
    """The mean output [n, classes] over `count` views (1, 2 or 6) of pictures [n, channels, height, width].

    Raises:
        UserError: of what is no picture there is one view alone.
    """
    if count == 1:
        return main_and_auxiliary(model(pictures))[0]
    if pictures.ndim != 4 or min(pictures.shape[2:]) < 2:
        shape = "x".join(map(str, pictures.shape[1:]))
        raise UserError(f"samples of the shape {shape} can't be mirrored", "train.evaluate_views", ("set it to 1",))
    outputs = [(weight, main_and_auxiliary(model(view))[0]) for weight, view in _views(pictures, count)]
    precise = torch.promote_types(outputs[0][1].dtype, torch.float32)
    return torch.stack([weight * output.to(precise) for weight, output in outputs]).sum(0)


def _views(pictures: Tensor, count: int) -> Iterator[tuple[float, Tensor]]:
    """Weights, which add up to 1, and views."""
    height, width = pictures.shape[2:]
    wide = F.pad(pictures, (1, 1, 1, 1), "reflect")
    shifted = [wide[:, :, by : by + height, by : by + width] for by in (0, 2)] if count == 6 else []
    for number, view in enumerate([pictures, *shifted]):
        weight = 0.125 if number else 0.25 if shifted else 0.5
        yield weight, view
        yield weight, view.flip(3)
