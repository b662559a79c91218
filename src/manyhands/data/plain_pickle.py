"""Reads a pickle of plain containers and byte arrays, and refuses everything else: it never runs foreign code.

The python version of CIFAR is such a file. A pickle names functions to call; here no name is looked up. The few
names that such a file needs stand for the inert classes below.
"""

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import UserError

_ERRORS = (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError)
_MORE_ERRORS = (UnicodeError, OverflowError, AssertionError)


class ByteArray:
    """A numpy array as the pickle describes it."""

    def __init__(self, *_: object) -> None:
        self.values = torch.empty(0, dtype=torch.uint8)  # uint8, of the array's shape, once its state was read

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Takes numpy's own state: version, shape, type, column order, bytes."""
        _, shape, kind, by_columns, content = state
        if not isinstance(kind, _Kind) or kind.name != "u1" or by_columns or not isinstance(content, bytes):
            raise pickle.UnpicklingError("only arrays of bytes, row by row, are allowed")
        self.values = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(*shape)


class _Kind:
    """A numpy type: its name is all that counts."""

    def __init__(self, name: object = "", *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, _: object) -> None:
        """Byte order and flags; bytes have none."""


def _encode(text: str, encoding: str) -> bytes:
    """What newer writers of old pickles use for bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"unknown encoding {encoding!r}")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): ByteArray,
    ("numpy._core.multiarray", "_reconstruct"): ByteArray,
    ("numpy", "ndarray"): ByteArray,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed") from None


def read_plain(content: bytes, place: str) -> Any:
    """Reads a pickle of plain data, byte arrays; text of Python 2 comes as bytes. Raises UserError: it holds more."""
    try:
        return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except (*_ERRORS, *_MORE_ERRORS, MemoryError, RecursionError, ImportError, RuntimeError) as error:
        mend = ("fetch the file again from its publisher",)
        raise UserError(f"{place} is no pickle of plain data: {error}", place, mend) from error


def as_tensor(value: Any) -> Tensor | None:
    return value.values if isinstance(value, ByteArray) else None
