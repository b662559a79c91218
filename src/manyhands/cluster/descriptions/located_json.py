"""JSON whose values know their line, so that a mistake in a user's file can be pointed at."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from manyhands.core.errors import UserError
from manyhands.core.outside import MOST_TEXT_BYTES, UnreadableError, finite_number, whole_number, without_halves

Path = tuple[str | int, ...]

_BLANK = re.compile(r"[ \t\r\n]*")
_DEEPEST = 50
_MOST_VALUES = 400_000  # each with its place; ten times what a table of ten thousand cards has


@dataclass(frozen=True)
class Document:
    """A JSON file."""

    value: Any  # what is in it
    lines: dict[Path, int]  # path of each value to its line, counted from 1
    where: str  # the file, for the user

    def at(self, path: Path) -> str:
        """File, line and field of a value; of what holds it where the value itself is missing."""
        known = path
        while known not in self.lines:
            known = known[:-1]
        return ": ".join(filter(None, (at_line(self.where, self.lines[known]), dotted(path))))


def at_line(where: str, line: int) -> str:
    """A line of a file, for the user."""
    return f"{where}, line {line}" if where else f"line {line}"


def dotted(path: Iterable[str | int]) -> str:
    """A path as people write it: server_list[1].device[0].rank_id."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def parse(text: str, where: str) -> Document:
    """Reads JSON. Raises UserError: it is none, far too large, or has a key twice with different values."""
    if len(text) > MOST_TEXT_BYTES or text.count(",") > _MOST_VALUES:
        raise UserError("this is far larger than a description of machines", where, ("give another file",))
    reader = _Reader(without_halves(text.removeprefix("\ufeff")), where)
    value = reader.value(())
    reader.skip_blanks()
    if reader.here:
        reader.refuse("something follows the end of the JSON")
    return Document(value, reader.lines, where)


class _Reader:
    """Goes through the text once and notes where each value begins."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where
        self.position = 0
        self.lines: dict[Path, int] = {}
        self._ends = [found.start() for found in re.finditer("\n", text)]
        self._decoder = json.JSONDecoder(
            parse_constant=self._no_constant, parse_int=whole_number, parse_float=finite_number
        )

    @property
    def here(self) -> str:
        """The next character; empty at the end."""
        return self.text[self.position : self.position + 1]

    def skip_blanks(self) -> None:
        found = _BLANK.match(self.text, self.position)
        self.position = found.end() if found else self.position

    def line(self, position: int | None = None) -> int:
        return bisect_right(self._ends, (self.position if position is None else position) - 1) + 1

    def refuse(self, what: str, position: int | None = None) -> NoReturn:
        at = self.position if position is None else position
        self.position = at
        if self.text.startswith(("//", "/*", "#"), at):
            what = "JSON has no comments"
        found = self.text[at : at + 20].splitlines()
        what += f': found "{found[0]}"' if found and found[0] else "" if self.here else ": the text ends here"
        raise UserError(
            f"this is not JSON: {what}", at_line(self.where, self.line(at)), ("mend the file at this line",)
        )

    def value(self, path: Path) -> Any:
        self.skip_blanks()
        self.lines[path] = self.line()
        if len(path) > _DEEPEST:
            self.refuse(f"more than {_DEEPEST} levels")
        if self.here == "{":
            return self._object(path)
        if self.here == "[":
            return self._array(path)
        try:
            found, self.position = self._decoder.raw_decode(self.text, self.position)
        except json.JSONDecodeError as error:
            self.refuse(error.msg[:1].lower() + error.msg[1:], error.pos)
        except UnreadableError as error:
            self.refuse(str(error))
        return found

    def _object(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._another("}", first=not found):
            if self.here != '"':
                self.refuse("expected a name in double quotes")
            line = self.line()
            key = self.value((*path, ""))
            del self.lines[*path, ""]
            self.skip_blanks()
            if self.here != ":":
                self.refuse('expected ":"')
            self.position += 1
            value = self.value((*path, key))
            if key in found and found[key] != value:
                self._twice((*path, key), line)
            found[key] = value
        return found

    def _array(self, path: Path) -> list[Any]:
        found: list[Any] = []
        while self._another("]", first=not found):
            found.append(self.value((*path, len(found))))
        return found

    def _another(self, closing: str, *, first: bool) -> bool:
        """Steps over the opening bracket or the comma; False at the end, which it steps over too."""
        self.skip_blanks()
        if first:
            self.position += 1
            self.skip_blanks()
        if self.here == closing:
            self.position += 1
            return False
        if not first:
            if self.here != ",":
                self.refuse(f'expected "," or "{closing}"')
            self.position += 1
            self.skip_blanks()
            if self.here == closing:
                self.refuse("a comma with nothing behind it")
        return True

    def _twice(self, path: Path, line: int) -> NoReturn:
        what = f"{dotted(path)} is given twice, with different values"
        raise UserError(what, at_line(self.where, line), ("keep one of the two",))

    def _no_constant(self, word: str) -> NoReturn:
        self.refuse(f"{word} is not a value of JSON")
