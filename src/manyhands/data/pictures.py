"""Decodes and preprocesses single picture files to uint8 pixels of the requested size, in worker processes.

Works like transforms.py, with equal random numbers, on single pictures of any size. simplejpeg decodes plain JPEGs
faster than Pillow, to equal bits; Pillow decodes the rest. Much too large JPEGs are scaled down during decoding.
"""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from manyhands.data.decode import PictureHeader, decode, read_header
from manyhands.data.transforms import DRAW_DOWN, DRAW_MIRROR, DRAW_RIGHT, Pixels, SampleRng, center_crop, crop_box, pad

decode_jpeg: Callable[..., Any] | None
try:
    from simplejpeg import decode_jpeg
except ImportError:  # it has no wheel for this system or Python
    decode_jpeg = None

_GAP = 2  # libjpeg scales down to no less than this multiple of the requested size: Pillow's advice for `reducing_gap`
_MOST_TIMES = 16  # maximum aspect ratio to resize: a picture of 60,000 x 1 pixels would need gigabytes


def read_picture(path: str, pixels: Pixels, rng: SampleRng | None, content: bytes, out: Tensor | None = None) -> Tensor:
    """Decodes a file's `content` to uint8 [C, S, S], into `out` if given. Augments the picture if `rng` is given."""
    header = read_header(path, content)
    scale = _scale(header, pixels, rng)
    values = _decode_plain_jpeg(content, header, pixels.channels, scale)
    if values is None:
        values = to_tensor(decode(path, pixels.channels, content, scale))
    out = torch.empty((pixels.channels, pixels.size, pixels.size), dtype=torch.uint8) if out is None else out
    return out.copy_(prepare_pixels(values, pixels, rng))


def _scale(header: PictureHeader, pixels: Pixels, rng: SampleRng | None) -> int:
    """Returns the factor, 1, 2, 4 or 8, by which decoding may reduce the picture's width and height."""
    shorter, wanted = min(header.width, header.height), pixels.resized_to
    if rng is not None and pixels.augment == "resized-crop-flip":
        wanted = pixels.size
        if shorter >= 2 * _GAP * wanted:
            left, top, right, bottom = crop_box(header.width, header.height, rng)
            shorter = min(right - left, bottom - top)
    return next((scale for scale in (8, 4, 2) if shorter >= scale * _GAP * wanted), 1)


def _decode_plain_jpeg(content: bytes, header: PictureHeader, channels: int, scale: int) -> Tensor | None:
    """Decodes a plain JPEG to uint8 [C or 1, H, W]. Returns None for files that Pillow must decode."""
    if decode_jpeg is None or not header.plain_jpeg or (channels == 1 and not header.grey):
        return None
    height, width = -(-header.height // scale), -(-header.width // scale)
    try:
        values = decode_jpeg(content, "GRAY" if header.grey else "RGB", min_height=height, min_width=width)
    except (ValueError, RuntimeError):  # libjpeg's errors and warnings; Pillow decides what is too damaged
        return None
    return torch.from_numpy(values).permute(2, 0, 1)


def prepare_pixels(values: Tensor, pixels: Pixels, rng: SampleRng | None) -> Tensor:
    """Resizes and crops uint8 [c, H, W] to [c, S, S], where S is `pixels.size`. Augments if `rng` is given."""
    if rng is None or pixels.augment == "none":
        return _center_crop(values, pixels)
    if pixels.augment == "resized-crop-flip":
        left, top, right, bottom = crop_box(values.shape[2], values.shape[1], rng)
        values = resize_bilinear(values[:, top:bottom, left:right], pixels.size, pixels.size)
    else:
        values, margin = _center_crop(values, pixels), pixels.padding
        left, top = (rng.below(draw, 2 * margin + 1) for draw in (DRAW_RIGHT, DRAW_DOWN))
        values = pad(values, margin, reflects=pixels.reflects)
        values = values[:, top : top + pixels.size, left : left + pixels.size]
    mirrors = pixels.flips and (rng.mirrored if pixels.alternates else rng.below(DRAW_MIRROR, 2))
    return values.flip(2) if mirrors else values


def resize_bilinear(values: Tensor, height: int, width: int) -> Tensor:
    """Resizes uint8 [C, H, W] with antialiased bilinear interpolation."""
    if values.shape[1:] == (height, width):
        return values
    return functional.interpolate(values[None], (height, width), mode="bilinear", antialias=True)[0]


def to_tensor(image: Image.Image) -> Tensor:
    """Copies a picture of mode "RGB" or "L" to uint8 [C, H, W], in channels-last memory format."""
    values = numpy.array(image)
    return torch.from_numpy(values[None] if values.ndim == 2 else values.transpose(2, 0, 1))


def _center_crop(values: Tensor, pixels: Pixels) -> Tensor:
    """Resizes the shorter side and crops the center. First removes the ends of a very long picture, to save time."""
    most = _MOST_TIMES * min(values.shape[1:])
    top, left = (max(0, side - most) // 2 for side in values.shape[1:])
    return center_crop(values[:, top : top + most, left : left + most], pixels, resize_bilinear)
