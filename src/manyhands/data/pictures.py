"""One picture to uint8 pixels of the size wanted, as worker processes do it.

What `transforms` does for batches of equal pictures is done here for single pictures of any size, with the same
draws. Where a picture has the wanted size already the result is the same to the last bit.

Of a usual JPEG only what a sample shows is decoded, and resized by the same call, where there is a compiler for that
(`jpeg_box`). Others are decoded
by torchvision where that makes Pillow's pixels in less time; all else, and what it refuses, by Pillow. Of a JPEG that
is many times larger than what is wanted libjpeg makes a smaller picture at once.
"""

import contextlib
import io
from collections.abc import Callable
from functools import cache

import numpy
import torch
from PIL import Image
from torch import Tensor

from manyhands.data.decode import MOST_PIXELS, PictureHeader, content_of, decode, probe
from manyhands.data.jpeg_box import JpegHeader, box_decoder, resized
from manyhands.data.random import SampleDraws
from manyhands.data.transforms import DRAW_DOWN, DRAW_MIRROR, DRAW_RIGHT, Pixels, crop_box, padded

# What libjpeg makes smaller stays at least so many times as large as what is wanted, so that resizing decides how it
# looks: Pillow's own measure for pictures that are as good as from the whole (`reducing_gap`).
_GAP = 2

# A picture may be so many times as long as it is wide before its ends, which aren't seen, are left out unresized: one
# of 60,000 x 1 pixels would take gigabytes.
_MOST_TIMES = 16


def read_picture(
    path: str, pixels: Pixels, draws: SampleDraws | None, content: bytes | None = None, out: Tensor | None = None
) -> Tensor:
    """A picture file, or its `content`, to uint8 [C, S, S]; without draws as for evaluation.

    That is `out` where it is given. Raises CorruptImageError: it can't be read.
    """
    content = content_of(path) if content is None else content
    out = torch.empty((pixels.channels, pixels.size, pixels.size), dtype=torch.uint8) if out is None else out
    if draws is not None and pixels.augment == "resized-crop-flip" and _read_box(path, content, pixels, draws, out):
        return out
    header = probe(path, content)
    scale = _scale(header, pixels, draws)
    values = _decoded_jpeg(content, header, pixels.channels) if scale == 1 else None
    if values is None:
        values = to_tensor(decode(path, pixels.channels, content, scale))
    return out.copy_(prepare(values, pixels, draws))


def _scale(header: PictureHeader | JpegHeader, pixels: Pixels, draws: SampleDraws | None) -> int:
    """How many times smaller a picture may be decoded: 1, 2, 4 or 8."""
    shorter, wanted = min(header.width, header.height), pixels.resized_to
    if draws is not None and pixels.augment == "resized-crop-flip":
        wanted = pixels.size
        if shorter >= 2 * _GAP * wanted:
            left, top, right, bottom = crop_box(header.width, header.height, draws)
            shorter = min(right - left, bottom - top)
    return next((scale for scale in (8, 4, 2) if shorter >= scale * _GAP * wanted), 1)


def _read_box(path: str, content: bytes, pixels: Pixels, draws: SampleDraws, out: Tensor) -> bool:
    """Fills `out` with what a sample shows of a usual JPEG; False for all others."""
    decoder = box_decoder()
    header = None if decoder is None else decoder.header(content)
    if decoder is None or header is None or header.channels > pixels.channels:
        return False
    if header.width * header.height > MOST_PIXELS or _scale(header, pixels, draws) > 1:
        return False
    if header.turned and not probe(path, content).plain_jpeg:
        return False
    box = crop_box(header.width, header.height, draws)
    return decoder(content, box, out, mirrored=_mirrored(pixels, draws))


def _mirrored(pixels: Pixels, draws: SampleDraws) -> bool:
    return pixels.flips and bool(draws.turn if pixels.alternates else draws.below(DRAW_MIRROR, 2))


def _decoded_jpeg(content: bytes, header: PictureHeader, channels: int) -> Tensor | None:
    """A usual JPEG as uint8 [C or 1, H, W]; None for all others, and for what has to be looked at more closely."""
    decoder = jpeg_decoder()
    if decoder is None or not header.plain_jpeg or (channels == 1 and not header.grey):
        return None
    with contextlib.suppress(RuntimeError):
        return decoder(content, 1 if header.grey else 3)
    return None


@cache
def jpeg_decoder() -> Callable[[bytes, int], Tensor] | None:
    """What makes uint8 [channels, H, W] of a JPEG in less time than Pillow, and to the same bits; None if nothing does.

    torchvision's own function is deprecated, and the operator below it will go with it: then it is Pillow again.
    """
    try:
        import torchvision  # noqa: F401 - brings the operator; a second that runs on other data don't need

        operator = torch.ops.image.decode_jpeg
    except (ImportError, OSError, AttributeError):
        return None

    def decoded(content: bytes, channels: int) -> Tensor:
        return operator(torch.frombuffer(bytearray(content), dtype=torch.uint8), channels, False)

    try:
        return decoded if all(_is_exact(decoded, channels) for channels in (1, 3)) else None
    except (RuntimeError, TypeError):
        return None


def _is_exact(decoded: Callable[[bytes, int], Tensor], channels: int) -> bool:
    """True where a decoder makes of a JPEG what Pillow's does; their libraries may be of different making."""
    values = numpy.arange(channels * 41 * 57, dtype=numpy.uint32) * 2654435761 >> 24
    picture = Image.fromarray(values.astype(numpy.uint8).reshape(41, 57, channels).squeeze())
    stored = io.BytesIO()
    picture.save(stored, "JPEG", quality=80)
    with Image.open(stored) as image:
        return torch.equal(decoded(stored.getvalue(), channels), to_tensor(image))


def prepare(values: Tensor, pixels: Pixels, draws: SampleDraws | None) -> Tensor:
    """Resizes, crops and mirrors uint8 [c, H, W] to [c, S, S]; without draws as for evaluation."""
    if draws is None or pixels.augment == "none":
        return _middle(values, pixels)
    if pixels.augment == "resized-crop-flip":
        left, top, right, bottom = crop_box(values.shape[2], values.shape[1], draws)
        values = resized(values[:, top:bottom, left:right], pixels.size, pixels.size)
    else:
        values = _shifted(_middle(values, pixels), pixels, draws)
    return values.flip(2) if _mirrored(pixels, draws) else values


def to_tensor(image: Image.Image) -> Tensor:
    """Copies a picture of mode "RGB" or "L" to uint8 [C, H, W], whose channels lie together."""
    values = numpy.array(image)
    return torch.from_numpy(values[None] if values.ndim == 2 else values.transpose(2, 0, 1))


def _middle(values: Tensor, pixels: Pixels) -> Tensor:
    """Resizes the shorter side and cuts out the middle; the ends of a very long picture are left out before."""
    size, shorter = pixels.size, min(values.shape[1:])
    most = _MOST_TIMES * shorter
    top, left = (max(0, side - most) // 2 for side in values.shape[1:])
    values = values[:, top : top + most, left : left + most]
    high, wide = (round(side * pixels.resized_to / shorter) for side in values.shape[1:])
    left, top = (wide - size) // 2, (high - size) // 2
    return resized(values, high, wide)[:, top : top + size, left : left + size]


def _shifted(values: Tensor, pixels: Pixels, draws: SampleDraws) -> Tensor:
    """Moves by up to `pixels.padding` rows and columns."""
    size, margin = values.shape[2], pixels.padding
    left = draws.below(DRAW_RIGHT, 2 * margin + 1)
    top = draws.below(DRAW_DOWN, 2 * margin + 1)
    return padded(values, margin, reflects=pixels.reflects)[:, top : top + size, left : left + size]
