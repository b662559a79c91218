"""A box of a usual JPEG, by a C file of this package that the machine's own compiler translates once.

What lies outside the box costs little or nothing, which torchvision and Pillow don't offer. The bits are theirs: a
library that makes others isn't taken, and what it doesn't know, damaged files above all, is left to them.
"""

import ctypes
import hashlib
import io
import os
import platform
import shutil
import stat
import subprocess
from functools import cache
from pathlib import Path

import numpy
import torch
from PIL import Image
from platformdirs import user_cache_dir
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.once import one_at_a_time, replacing
from manyhands.data.places import cache_folder

Box = tuple[int, int, int, int]  # left, top, right, bottom
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-march=native", "-fwrapv", "-shared", "-fPIC")
_LONGEST_S = 120
NO_COMPILER = "JPEGs are decoded whole, which takes longer: the decoder of parts needs a C compiler, gcc 12 or clang"


class BoxDecoder:
    """Calls the library."""

    def __init__(self, library: Path) -> None:
        self._decode = ctypes.CDLL(str(library)).jpeg_box
        self._decode.argtypes = [ctypes.c_char_p, ctypes.c_size_t, *[ctypes.c_int] * 5, ctypes.c_void_p]

    def __call__(self, content: bytes, box: Box, channels: int) -> Tensor | None:
        """The box as uint8 [channels, H, W], whose channels lie together; None for what only others can decode."""
        left, top, right, bottom = box
        values = torch.empty((bottom - top, right - left, channels), dtype=torch.uint8)
        failed = self._decode(content, len(content), *box, channels, values.data_ptr())
        return None if failed else values.permute(2, 0, 1)


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
    library = _own_folder() / f"jpeg_box-{key[:20]}.so"
    with one_at_a_time(library):
        if not _is_ours(library):
            with replacing(library) as part:
                command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(part)]
                subprocess.run(command, check=True, capture_output=True, timeout=_LONGEST_S)
                part.chmod(0o700)
    return library


def _own_folder() -> Path:
    """Where what is loaded lies: people may share a cache, and nobody runs what another could have put there."""
    for base in (cache_folder(), Path(user_cache_dir("manyhands"))):
        folder = base / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        above = (place.stat().st_mode for place in folder.resolve().parents)
        # Where a sticky bit is, as in /tmp, nobody moves what is another's.
        if _is_ours(folder) and not any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above):
            return folder
    raise PermissionError(f"others can write to {folder}")


def _is_ours(path: Path) -> bool:
    """True for a file or folder, no link, that is this user's own and that nobody else can write to."""
    try:
        state = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISLNK(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022


def _processor() -> str:
    """What a processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.lower().startswith(("flags", "features"))}
    return "\n".join((platform.system(), platform.machine(), platform.processor(), *sorted(told)))


def _is_exact(decoder: BoxDecoder, channels: int) -> bool:
    """True where a box of a JPEG has Pillow's pixels, with colour of each fineness."""
    small = numpy.arange(48 * channels, dtype=numpy.uint32) * 2654435761 >> 24
    picture = Image.fromarray(small.astype(numpy.uint8).reshape(6, 8, channels).squeeze()).resize((57, 41))
    for fineness in (0, 1, 2):
        stored = io.BytesIO()
        picture.save(stored, "JPEG", quality=90, subsampling=fineness)
        with Image.open(stored) as image:
            whole = torch.from_numpy(numpy.array(image)).view(41, 57, channels).permute(2, 0, 1)
        found = decoder(stored.getvalue(), (5, 3, 50, 38), channels)
        if found is None or not torch.equal(found, whole[:, 3:38, 5:50]):
            return False
    return True
