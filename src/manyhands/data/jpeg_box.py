"""A box of a usual JPEG, resized, by a C file of this package that the machine's own compiler translates once.

What lies outside the box costs little or nothing, which torchvision and Pillow don't offer. The bits are theirs and
torch's: a library that makes others isn't taken, and what it doesn't know, damaged files above all, is left to them.
"""

import ctypes
import hashlib
import io
import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from manyhands.core.errors import UserError
from manyhands.core.once import one_at_a_time, replacing
from manyhands.data.places import is_ours_alone, own_folder

Box = tuple[int, int, int, int]  # left, top, right, bottom
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-march=native", "-fwrapv", "-shared", "-fPIC")
_LONGEST_S = 120
NO_COMPILER = "JPEGs are decoded whole, which takes longer: the decoder of parts needs a C compiler, gcc 12 or clang"


class _Taps(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int),
        ("one", ctypes.c_float),
        ("first", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class JpegHeader:
    """What the library knows of a usual JPEG."""

    width: int
    height: int
    channels: int
    turned: bool  # True where a camera's data may ask for the picture to be turned


class BoxDecoder:
    """Calls the library."""

    def __init__(self, library: Path) -> None:
        code = ctypes.CDLL(str(library))
        self._look, self._decode = code.jpeg_look, code.jpeg_box
        self._look.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
        taps = ctypes.POINTER(_Taps)
        ends = [*[ctypes.c_int] * 4, ctypes.c_void_p]
        self._decode.argtypes = [ctypes.c_char_p, ctypes.c_size_t, *[ctypes.c_int] * 4, taps, taps, *ends]

    def header(self, content: bytes) -> JpegHeader | None:
        """None for what only others can read."""
        found = (ctypes.c_int32 * 4)()
        if self._look(content, len(content), found):
            return None
        width, height, channels, turned = found
        return JpegHeader(width, height, channels, bool(turned))

    def __call__(self, content: bytes, box: Box, out: Tensor, *, mirrored: bool = False) -> bool:
        """Fills uint8 [channels, H, W], whose values lie together, with the box; False: only others can decode it."""
        channels, high, wide = out.shape
        across, down = _taps(box[2] - box[0], wide), _taps(box[3] - box[1], high)
        if across is None or down is None:
            return False
        ends = channels, wide, high, mirrored, out.data_ptr()
        return not self._decode(content, len(content), *box, across[0], down[0], *ends)


@lru_cache(maxsize=4096)
def _taps(size: int, wanted: int) -> tuple[_Taps, numpy.ndarray, numpy.ndarray] | None:
    """How torch makes `wanted` bytes of `size`, bilinear and smoothed, and what that points to.

    The weights are whole numbers as large as 16 bits hold. None: sums of these aren't exact in single precision, which
    begins where it gets four times smaller.
    """
    scale = size / wanted
    reach = max(scale, 1.0)
    centers = scale * (numpy.arange(wanted) + 0.5)
    first = (centers - reach + 0.5).astype(numpy.int32).clip(min=0)
    ends = (centers + reach + 0.5).astype(numpy.int32).clip(max=size)
    places = first[:, None] + numpy.arange(max(0, *(ends - first)))
    weights = (1 - abs((places - centers[:, None] + 0.5) * (1 / reach))).clip(min=0) * (places < ends[:, None])
    weights /= weights.sum(1, keepdims=True)
    if size == wanted:  # nothing is resized
        weights, one = numpy.ones((len(first), 1)), 1
    else:
        one = 1 << next((bits for bits in range(17) if int(0.5 + weights.max() * (2 << bits)) >= 1 << 15), 17)
        if one > 1 << 16:
            return None
    rounded = numpy.floor(0.5 + weights * one).astype(numpy.float32)
    return _Taps(rounded.shape[1], one, first.ctypes.data, rounded.ctypes.data), first, rounded


@cache
def box_decoder() -> BoxDecoder | None:
    """The decoder; None where no compiler makes it, or where it makes other bits than Pillow."""
    try:
        decoder = BoxDecoder(_library())
    except (OSError, UserError, subprocess.SubprocessError, AttributeError):
        return None
    return decoder if all(_is_exact(decoder, channels) for channels in (1, 3)) else None


def _library() -> Path:
    """Raises OSError, UserError, SubprocessError: there is no compiler, or it fails."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("cc")
    # Machines may share a home: a library is for one kind of processor.
    key = hashlib.sha256("\0".join((_SOURCE.read_text(encoding="utf-8"), *_FLAGS, _processor())).encode()).hexdigest()
    library = own_folder("native") / f"jpeg_box-{key[:20]}.so"
    with one_at_a_time(library):
        if not is_ours_alone(library):
            with replacing(library) as part:
                command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(part)]
                subprocess.run(command, check=True, capture_output=True, timeout=_LONGEST_S)
                part.chmod(0o700)
    return library


def _processor() -> str:
    """What a processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.lower().startswith(("flags", "features"))}
    return "\n".join((platform.system(), platform.machine(), platform.processor(), *sorted(told)))


def _is_exact(decoder: BoxDecoder, channels: int) -> bool:
    """True where a box of a JPEG has Pillow's pixels, with colour of each fineness, and torch's when resized."""
    small = numpy.arange(48 * channels, dtype=numpy.uint32) * 2654435761 >> 24
    picture = Image.fromarray(small.astype(numpy.uint8).reshape(6, 8, channels).squeeze()).resize((57, 41))
    for fineness, size in enumerate(((35, 45), (18, 64), (70, 31))):
        stored = io.BytesIO()
        picture.save(stored, "JPEG", quality=90, subsampling=fineness)
        with Image.open(stored) as image:
            whole = torch.from_numpy(numpy.array(image)).view(41, 57, channels).permute(2, 0, 1)
        found = torch.empty((channels, *size), dtype=torch.uint8)
        made = decoder(stored.getvalue(), (5, 3, 50, 38), found)
        if not made or not torch.equal(found, resized(whole[:, 3:38, 5:50], *size)):
            return False
    return True


def resized(values: Tensor, height: int, width: int) -> Tensor:
    """Resizes uint8 [C, H, W] with torch."""
    if values.shape[1:] == (height, width):
        return values
    return functional.interpolate(values[None], (height, width), mode="bilinear", antialias=True)[0]
