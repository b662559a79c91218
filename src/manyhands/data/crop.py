"""Which part of a picture a training sample shows: ImageNet's usual recipe, in plain arithmetic."""

import math

from manyhands.data.random import SampleDraws

_FIRST_DRAW, _ATTEMPTS = 16, 10
_AREA = (0.08, 1.0)
_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))


def crop_box(width: int, height: int, draws: SampleDraws) -> tuple[int, int, int, int]:
    """Draws a box (left, top, right, bottom) of 8 to 100 % of the area, 3:4 to 4:3; after ten attempts the middle.

    Source: the distribution of torchvision's RandomResizedCrop; Szegedy et al. 2014, arXiv:1409.4842.
    """
    for attempt in range(_ATTEMPTS):
        first = _FIRST_DRAW + 4 * attempt
        area = width * height * (_AREA[0] + (_AREA[1] - _AREA[0]) * draws.uniform(first))
        ratio = math.exp(_LOG_RATIO[0] + (_LOG_RATIO[1] - _LOG_RATIO[0]) * draws.uniform(first + 1))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = draws.below(first + 2, width - wide + 1), draws.below(first + 3, height - high + 1)
            return left, top, left + wide, top + high
    return _middle_box(width, height)


def _middle_box(width: int, height: int) -> tuple[int, int, int, int]:
    """The largest box in the middle whose ratio is between 3:4 and 4:3."""
    wide, high = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high
