"""What a pickle that isn't loaded would have made, found without running anything in it."""

import io
import itertools
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

# A network's own pickle names its tensors and has none of their bytes, so it is far smaller.
_MOST_BYTES, _MOST_STEPS = 32 << 20, 2_000_000
# torch's older files hold a magic number, a version and a description of the system before the content.
_MOST_PICKLES = 5
# What names of tensors and plain data are made of, which torch loads.
_HARMLESS = re.compile(r"torch\._utils\._rebuild\w+|torch\.(storage\.)?\w+Storage|collections\.OrderedDict")


def names_objects(path: Path) -> list[str]:
    """Names of the Python objects that a .pth or .pth.tar file asks for, beside tensors; empty where it is no pickle.

    Only what each step of the pickle is gets read; none is done. Names that a pickle puts together as it goes are given
    as "?".
    """
    try:
        return list(dict.fromkeys(name for name in _asked_for(_pickle_of(path)) if not _HARMLESS.fullmatch(name)))
    except (ValueError, OSError, KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return []  # the bytes can't be understood as a pickle, which is the answer


def _pickle_of(path: Path) -> bytes:
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            return file.read(_MOST_BYTES)
    with zipfile.ZipFile(path) as archive:
        inner = next(name for name in [*archive.namelist(), ""] if name.endswith("data.pkl") or not name)
        with archive.open(inner) as content:
            return content.read(_MOST_BYTES)


def _asked_for(content: bytes) -> Iterator[str]:
    """Module and name of each object, in the order in which loading asks for them. Raises ValueError: no pickle."""
    stream = io.BytesIO(content)
    for number in range(_MOST_PICKLES):
        if number and stream.read(1) not in (b"\x80", b"(", b"c", b"}"):
            return  # what follows are a file's tensors
        stream.seek(-1 if number else 0, io.SEEK_CUR)
        words: list[str] = []
        for step, argument, _ in itertools.islice(pickletools.genops(stream), _MOST_STEPS):
            if step.name in {"GLOBAL", "INST"}:
                yield str(argument).replace(" ", ".")
            elif step.name == "STACK_GLOBAL":
                yield ".".join(words[-2:]) or "?"
            elif isinstance(argument, str):
                words.append(argument)
