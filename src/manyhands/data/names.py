"""Names of millions of files as two arrays: some 40 bytes each, which processes share where a file has them mapped.

A string of its own would take four times as much, and each process that looked at one would copy its page of memory.
No torch.
"""

import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy

_BLOCK = 1 << 12


@dataclass(frozen=True, eq=False)
class PictureNames(Sequence[str]):
    """Paths of pictures below a folder, in an order that is kept; two are equal where they name the same below it."""

    text: numpy.ndarray  # uint8 [bytes], each name with a zero byte behind it
    ends: numpy.ndarray  # int64 [names in text], where each ends, the zero included
    rows: numpy.ndarray | None = None  # int64 [n], which of them are meant; None: all
    root: str = ""  # what the names lie below; given before each

    @classmethod
    def of(cls, names: Iterable[str]) -> "PictureNames":
        return cls.of_text(b"".join(map(encoded, names)))

    @classmethod
    def of_text(cls, text: bytes | bytearray) -> "PictureNames":
        """From names with a zero byte behind each."""
        values = numpy.frombuffer(text, numpy.uint8)
        return cls(values, numpy.flatnonzero(values == 0) + 1)

    def __len__(self) -> int:
        return len(self.ends if self.rows is None else self.rows)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> "PictureNames": ...
    def __getitem__(self, place: int | slice) -> "str | PictureNames":
        if isinstance(place, slice):
            return self.part(numpy.arange(len(self))[place])
        row = range(len(self))[place] if self.rows is None else int(self.rows[place])
        start = int(self.ends[row - 1]) if row else 0
        name = self.text[start : int(self.ends[row]) - 1].tobytes().decode(errors="surrogateescape")
        return os.path.join(self.root, name)  # noqa: PTH118 - a million of these

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PictureNames):
            return NotImplemented
        return len(self) == len(other) and all(map(bytes.__eq__, self.blocks(), other.blocks()))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def below(self, root: str) -> "PictureNames":
        return PictureNames(self.text, self.ends, self.rows, root)

    def part(self, chosen: Sequence[int] | numpy.ndarray) -> "PictureNames":
        rows = numpy.asarray(chosen, numpy.int64)
        return PictureNames(self.text, self.ends, rows if self.rows is None else self.rows[rows], self.root)

    def blocks(self) -> Iterator[bytes]:
        """All names, without the folder, each with a zero byte behind it; some thousands at a time."""
        for first in range(0, len(self), _BLOCK):
            last = min(first + _BLOCK, len(self))
            rows = numpy.arange(first, last) if self.rows is None else self.rows[first:last]
            starts = numpy.where(rows > 0, self.ends[rows - 1], 0)
            lengths = self.ends[rows] - starts
            before = numpy.cumsum(lengths) - lengths
            yield self.text[numpy.repeat(starts - before, lengths) + numpy.arange(int(lengths.sum()))].tobytes()


def encoded(name: str) -> bytes:
    return name.encode(errors="surrogateescape") + b"\0"


def plain_form(name: str) -> str:
    """A name as it looks: Unicode's composed form (NFC), without blanks at the ends."""
    return unicodedata.normalize("NFC", name).strip()


def lookalike_difference(name: str, known: Iterable[str]) -> str:
    """What a name differs in from one of those known that looks the same; else empty."""
    for other in known:
        if other != name and plain_form(other) == plain_form(name):
            how = "spaces at the start or end" if other.strip() == name.strip() else "Unicode form (such as NFC, NFD)"
            return f"{name!a} and {other!a} differ in {how}"
    return ""
