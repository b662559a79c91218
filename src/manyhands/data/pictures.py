"""One decoded picture to uint8 pixels of the size wanted, as worker processes do it.

What `transforms` does for batches of equal pictures is done here for single pictures of any size, with the same
draws. Where a picture has the wanted size already the result is the same to the last bit.
"""

import numpy
import torch
from PIL import Image
from torch import Tensor

from manyhands.data.crop import crop_box
from manyhands.data.random import SampleDraws
from manyhands.data.transforms import DRAW_DOWN, DRAW_MIRROR, DRAW_RIGHT, Pixels, padding


def prepare(image: Image.Image, pixels: Pixels, draws: SampleDraws | None) -> Tensor:
    """Resizes, crops and mirrors a picture of mode "RGB" or "L" to uint8 [C, S, S]; without draws as for evaluation."""
    if draws is None or pixels.augment == "none":
        return to_tensor(_middle(image, pixels))
    if pixels.augment == "resized-crop-flip":
        box = crop_box(image.width, image.height, draws)
        # Cut first: with `box=` Pillow would blend in what lies around the part.
        image = image.crop(box).resize((pixels.size, pixels.size), Image.Resampling.BILINEAR)
    else:
        image = _shifted(_middle(image, pixels), draws)
    if pixels.augment != "crop" and draws.below(DRAW_MIRROR, 2):
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return to_tensor(image)


def to_tensor(image: Image.Image) -> Tensor:
    """Copies a picture of mode "RGB" or "L" to uint8 [C, H, W]."""
    values = numpy.array(image)
    return torch.from_numpy(values[None] if values.ndim == 2 else values.transpose(2, 0, 1)).contiguous()


def _middle(image: Image.Image, pixels: Pixels) -> Image.Image:
    """Resizes the shorter side and cuts out the middle."""
    size, shorter = pixels.size, min(image.size)
    wide, high = (round(side * pixels.resized_to / shorter) for side in image.size)
    if (wide, high) != image.size:
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
    left, top = (wide - size) // 2, (high - size) // 2
    return image.crop((left, top, left + size, top + size)) if (wide, high) != (size, size) else image


def _shifted(image: Image.Image, draws: SampleDraws) -> Image.Image:
    """Moves by up to `padding` rows and columns; Pillow fills with black what lies outside."""
    margin = padding(image.width)
    left = draws.below(DRAW_RIGHT, 2 * margin + 1) - margin
    top = draws.below(DRAW_DOWN, 2 * margin + 1) - margin
    return image.crop((left, top, left + image.width, top + image.height))
