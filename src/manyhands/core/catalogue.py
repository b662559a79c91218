"""The words of this program in the reader's language, by a gettext catalogue.

The English text is its own key: locale/manyhands.pot holds every text of the source, a value as {name}
(scripts/build_catalogue.py writes it), and nothing is marked in the source. Records, errors and messages between
machines stay English; a text is put into the reader's language where it is shown, by the key whose fixed words it has.
"""

import os
import re
import string
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

LANGUAGE = "MANYHANDS_LANG"
# What the source is written in.
ENGLISH = ("", "en", "C")
FOLDER = Path(__file__).parent.parent / "locale"
# A value may be a text with values of its own.
_DEEPEST = 4
_WORD = re.compile("[A-Za-z]{2}")


class _Key(NamedTuple):
    """A text of the catalogue that holds values."""

    fixed: tuple[str, ...]  # its fixed words; one more than the values
    names: tuple[str, ...]  # the values' names, in their order
    target: str  # the text in the reader's language, with the same names


class Texts(NamedTuple):
    """A catalogue as it is looked up: texts without values, and keys with them, the most fixed words first."""

    whole: dict[str, str]
    keys: tuple[_Key, ...]


def translated(text: str) -> str:
    """A text of one or several lines in the reader's language; what the catalogue doesn't have stays as it is.

    MANYHANDS_LANG is a language ("zh"), or the path of a catalogue of one's own (.mo). Without one: English.
    """
    texts = _load(os.environ.get(LANGUAGE, ""))
    return "\n".join(_line(texts, line, _DEEPEST) for line in text.split("\n")) if texts else text


def _line(texts: Texts, text: str, deepest: int) -> str:
    body = text.strip()
    if not deepest or not _WORD.search(body):
        return text
    said = texts.whole.get(body) or next(filter(None, (_by(texts, key, body, deepest) for key in texts.keys)), None)
    if said is None:  # columns, perhaps
        cells = re.split("( {2,})", body)
        said = "".join(_line(texts, cell, deepest - 1) for cell in cells) if len(cells) > 1 else body
    return text.replace(body, said, 1)


def _by(texts: Texts, key: _Key, text: str, deepest: int) -> str | None:
    # Most are passed over here, so only the patterns of what is shown are ever built.
    if not all(fixed in text for fixed in key.fixed):
        return None
    found = re.fullmatch("(.*?)".join(map(re.escape, key.fixed)), text)
    if found is None:
        return None
    values = (_line(texts, value, deepest - 1) for value in found.groups())
    return key.target.format(**dict(zip(key.names, values, strict=True)))


@cache
def _load(language: str) -> Texts | None:
    """The catalogue of a language; None for English, and where it can't be used, which `read_catalogue` says."""
    try:
        return None if language in ENGLISH else read_catalogue(language)
    except (OSError, ValueError):
        return None


@cache
def read_catalogue(language: str) -> Texts:
    """The texts of a language. Raises OSError, ValueError: there is no catalogue for it, or it can't be read."""
    import gettext

    class Catalogue(gettext.GNUTranslations):
        """gettext's own reader, which also says what it holds."""

        def texts(self) -> dict[str, str]:
            return {key: said for key, said in self._catalog.items() if key and said}  # pyright: ignore - gettext's

    path = Path(language) if language.endswith(".mo") else FOLDER / Path(language).name / "LC_MESSAGES/manyhands.mo"
    try:
        with path.open("rb") as file:
            keys = [_key(source, said) for source, said in Catalogue(file).texts().items()]
    except (struct.error, AttributeError, IndexError, KeyError) as error:  # what gettext's reader gives for other files
        raise ValueError(f"{path} is no catalogue of gettext's (.mo)") from error
    whole = {key.fixed[0]: key.target.format() for key in keys if not key.names}
    with_values = sorted((key for key in keys if key.names), key=lambda key: (-len("".join(key.fixed)), key.fixed))
    return Texts(whole, tuple(with_values))


def _key(source: str, said: str) -> _Key:
    fixed, names = [""], list[str]()
    for words, name, _, _ in string.Formatter().parse(source):
        fixed[-1] += words
        if name is not None:
            names.append(name)
            fixed.append("")
    if set(names) != {name for _, name, _, _ in string.Formatter().parse(said) if name is not None}:
        raise ValueError(f'"{said}" has other values than "{source}"')
    said.format(**dict.fromkeys(names, ""))  # a catalogue of another program's may have fields without a name
    return _Key(tuple(fixed), tuple(names), said)
