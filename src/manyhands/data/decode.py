"""Decodes a picture file of any format to 8-bit RGB or grey."""

import contextlib
import io
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin

from manyhands.core.errors import UserError
from manyhands.core.files import UnreadableError, open_file

PICTURE_SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff",
    ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif",
})  # fmt: skip
_GREY = frozenset({"1", "L", "LA", "La", "I", "F"})
_WITH_ALPHA = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})
_EVEN = 15  # levels by which compression may change a uniform color
_WIDE_PORTABLE = frozenset({"PNG", "PPM"})  # formats whose mode "I" has 16 bits
_MOST_MEGAPIXELS = 89  # Pillow's limit for warnings; such a picture needs 0.7 GB and a second
_BLOCK_ROWS = 256
_OTHER_TIFF = "a TIFF file needs 1, 3 or 4 channels of 8 bits, or one channel of 16 or 32 bits"
# End markers of undamaged files; some programs add a few bytes after them.
_ENDS, _NEAR_END = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}, 64

# Pillow logs a line for each TIFF of many channels before it raises; without a handler, logging would print it.
logging.getLogger("PIL").addHandler(logging.NullHandler())


class CorruptImageError(UserError):
    """A picture file can't be read."""


def corrupt_image_error(path: str, reason: str) -> CorruptImageError:
    hints = ("repair or remove the file", "or skip unreadable pictures in training: --data.skip-corrupt")
    return CorruptImageError(f"the picture {Path(path).name} can't be read: {reason}", path, hints)


def decode(path: str, channels: int, content: bytes, scale: int = 1) -> Image.Image:
    """Decodes a picture (its first frame) to mode "RGB" (3 channels) or "L" (1), upright and without transparency.

    `content`: the bytes of the file. `scale`: 2, 4 or 8 to decode a JPEG at about 1/scale of its size.
    Raises CorruptImageError if the content is empty, truncated, not a picture, or over 89 megapixels.
    """
    with _opened_image(path, content) as image:
        if scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
        image.load()
        with contextlib.suppress(Exception):  # broken EXIF data raises a dozen exception types; the pixels are intact
            ImageOps.exif_transpose(image, in_place=True)
        return to_mode(image, channels)


@dataclass(frozen=True)
class PictureHeader:
    """The size and kind of a picture, read without decoding its pixels."""

    width: int  # as stored, before a camera's orientation is applied
    height: int
    grey: bool
    plain_jpeg: bool  # True for an upright JPEG in grey or RGB


def read_header(path: str, content: bytes) -> PictureHeader:
    """Reads a picture's header. Raises CorruptImageError if the header can't be read."""
    with _opened_image(path, content) as image:
        plain = False
        # MPO: several pictures in one file, written by some cameras; the first one is used.
        if image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB"):
            with contextlib.suppress(Exception):  # broken EXIF data raises a dozen exception types
                plain = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
        return PictureHeader(image.width, image.height, is_grey(image), plain)


def is_readable(path: str, content: bytes) -> bool:
    """Returns True if a picture can be decoded. Trusts a JPEG or PNG with an intact end marker without decoding it."""
    try:
        with _opened_image(path, content) as image:
            end = _ENDS.get(image.format or "", b"")
        if not end or end not in content[-_NEAR_END:]:
            decode(path, 3, content)
    except (CorruptImageError, MemoryError):
        return False
    return True


def read_content(path: str) -> bytes:
    """Reads an entire file, because Pillow would allocate as many bytes as the header of a damaged picture claims."""
    try:
        with open_file(Path(path)) as file:
            return file.read()
    except (UnreadableError, IsADirectoryError) as error:
        raise corrupt_image_error(path, "the path is a folder, a pipe or a device") from error
    except OSError as error:
        reasons = {FileNotFoundError: "the file no longer exists", PermissionError: "no permission to read it"}
        raise corrupt_image_error(path, reasons.get(type(error), str(error))) from error


@contextlib.contextmanager
def _opened_image(path: str, content: bytes) -> Iterator[Image.Image]:
    """Yields an image that isn't decoded yet. Raises CorruptImageError for a large image or errors in the context."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > _MOST_MEGAPIXELS * 1_000_000:
                raise _too_large_error(path, image.width * image.height)
            channels = getattr(image, "tag_v2", {}).get(TiffImagePlugin.SAMPLESPERPIXEL, 1)
            if channels > 2 and len(image.getbands()) == 1:  # separate planes, of which Pillow reads only the first
                raise corrupt_image_error(path, f"{_OTHER_TIFF}; found {channels} channels")
            yield image
    except (CorruptImageError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # the latter with -W error
        raise _too_large_error(path, int((re.search(r"\d+", str(error)) or [0])[0])) from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "Pillow doesn't recognize the format" if content else "the file is empty"
            reason = _OTHER_TIFF if content.startswith((b"II*\0", b"MM\0*")) else reason
        raise corrupt_image_error(path, reason) from error


def _too_large_error(path: str, pixels: int) -> CorruptImageError:
    reason = f"{pixels / 1e6:.0f} megapixels exceed the limit of {_MOST_MEGAPIXELS}; resize the picture"
    return corrupt_image_error(path, reason)


def is_grey(image: Image.Image) -> bool:
    return image.mode in _GREY or image.mode.startswith("I;16")


def to_mode(image: Image.Image, channels: int) -> Image.Image:
    """Converts a loaded picture of any mode to "RGB" (3 channels) or "L" (1).

    Drops the alpha channel. A picture of a single color, such as an icon, has its content in the alpha channel, and is
    drawn on white, or on black if the color is bright.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_eight_bits(image)
    if image.mode in _WITH_ALPHA or (image.mode == "P" and "transparency" in image.info):
        image = _without_alpha(image.convert("RGBA"))
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _without_alpha(image: Image.Image) -> Image.Image:
    extremes: Any = image.getextrema()
    *colors, (least, most) = extremes
    if least == most or any(high - low > _EVEN for low, high in colors):
        return image
    ground = 0 if max(high for _, high in colors) > 127 else 255
    drawn = Image.new("RGB", image.size, (ground, ground, ground))
    drawn.paste(image, mask=image.getchannel("A"))
    return drawn


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scales 16-bit and 32-bit values to 0 … 255 instead of clipping them at 255.

    16-bit values are divided by 257. 32-bit integers and floats have no standard range: floats up to 1 are multiplied
    by 255, values up to 255 stay, values up to 65,535 are divided by 257; others are stretched from minimum to maximum.
    """
    values = numpy.nan_to_num(numpy.array(image), copy=False)
    low, high = float(values.min()), float(values.max())
    offset, factor, divisor = 0.0, 1.0, 1.0
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _WIDE_PORTABLE):
        divisor = 257
    elif image.mode == "F" and low >= 0 and high <= 1:
        factor = 255
    elif low >= 0 and 255 < high <= 65535:
        divisor = 257
    elif low < 0 or high > 255:
        offset, factor = low, 255 / (high - low) if high > low else 0.0
    scaled = numpy.empty(values.shape, numpy.uint8)
    # In blocks: the entire picture in double precision would need eight bytes per pixel.
    for start in range(0, len(values), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        scaled[rows] = ((values[rows].astype(numpy.float64) - offset) * factor / divisor).round().clip(0, 255)
    return Image.fromarray(scaled)
