"""One picture file of any kind to 8-bit RGB or grey."""

import io
from pathlib import Path

import numpy
from PIL import Image, ImageOps

from manyhands.core.errors import UserError

_SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
_MORE_SUFFIXES = frozenset({".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"})
_GREY = frozenset({"1", "L", "LA", "La", "I", "F"})
_WIDE_PORTABLE = frozenset({"PNG", "PPM"})  # formats whose "I" is 16 bits wide

PICTURE_SUFFIXES = _SUFFIXES | _MORE_SUFFIXES


class CorruptImageError(UserError):
    """A file can't be read as a picture."""


def corrupt(path: str, reason: str) -> CorruptImageError:
    """The error for a picture that can't be read."""
    mend = ("mend or remove the file", "or leave such pictures out: --data.skip-corrupt")
    return CorruptImageError(f"the picture {Path(path).name} can't be read: {reason}", path, mend)


def decode(path: str, channels: int, content: bytes | None = None) -> Image.Image:
    """Decodes a picture.

    Grey, palette, CMYK, 16-bit and floating-point pictures are converted, a camera's orientation is applied,
    transparency is dropped, and the first frame of an animation is taken.

    Args:
        path: the file; names the picture in errors.
        channels: 3 for mode "RGB", 1 for "L".
        content: the file's bytes, where they are at hand already.

    Raises:
        CorruptImageError: it is missing, empty, cut short, no picture, or larger than Pillow allows.
    """
    try:
        with Image.open(path if content is None else io.BytesIO(content)) as image:
            image.load()
            return to_mode(_upright(image), channels)
    except MemoryError:
        raise
    except Exception as error:
        raise corrupt(path, _reason(path, error, content)) from error


def probe(path: str) -> tuple[int, int, bool]:
    """Reads only a picture's header: width, height as stored, and whether it is grey.

    Raises:
        CorruptImageError: it can't be read.
    """
    try:
        with Image.open(path) as image:
            return image.width, image.height, is_grey(image)
    except Exception as error:
        raise corrupt(path, _reason(path, error, None)) from error


def is_grey(image: Image.Image) -> bool:
    """True for modes without colour."""
    return image.mode in _GREY or image.mode.startswith("I;16")


def to_mode(image: Image.Image, channels: int) -> Image.Image:
    """Converts a loaded picture of any mode to "RGB" (3 channels) or "L" (1)."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _eight_bits(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("L" if channels == 1 else "RGB")


def _upright(image: Image.Image) -> Image.Image:
    """Turns the picture as its camera says; a picture whose EXIF data is broken stays as it is."""
    try:
        turned = ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001 - Pillow raises a dozen kinds; the pixels themselves are whole
        return image
    turned.format = image.format
    return turned


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scales wide values to 0 … 255 instead of cutting them off at 255.

    16 bits: by 257. 32-bit whole numbers and fractions have no agreed range: 0 to 1 where all values lie there
    (fractions), 0 to 255 as they are, 0 to 65,535 by 257, else from the picture's least to its greatest.
    """
    values = numpy.nan_to_num(numpy.asarray(image).astype(numpy.float64))
    low, high = float(values.min()), float(values.max())
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _WIDE_PORTABLE):
        values = values / 257
    elif image.mode == "F" and low >= 0 and high <= 1:
        values = values * 255
    elif low >= 0 and 255 < high <= 65535:
        values = values / 257
    elif low < 0 or high > 255:
        values = (values - low) * (255 / (high - low)) if high > low else values * 0
    return Image.fromarray(numpy.clip(values.round(), 0, 255).astype(numpy.uint8))


def _reason(path: str, error: Exception, content: bytes | None) -> str:
    """A few words for people."""
    if isinstance(error, FileNotFoundError):
        return "the file is gone"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, Image.UnidentifiedImageError):
        length = len(content) if content is not None else Path(path).stat().st_size
        return "the file is empty" if length == 0 else "it is no picture that Pillow knows"
    return str(error) or type(error).__name__
