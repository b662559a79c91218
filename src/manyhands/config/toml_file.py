"""Reads a job.toml, and says what is wrong with one that isn't TOML in the words of what its writer meant."""

import re
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.outside import MOST_TOML_BYTES, decoded, parse_toml, read_bytes

# Sections that may be written as one word: data = "mnist" is data.name = "mnist".
ONE_WORD = {"data": "name", "model": "name", "parallel": "mode", "sync": "method"}

_KEY_OR_VALUE = ('write values as key = "text" or key = 3',)


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file, in UTF-8 with or without a byte-order mark.

    Raises:
        UserError: it is missing, or isn't TOML.
    """
    try:
        text = decoded(read_bytes(path, MOST_TOML_BYTES, pipes=True))
    except FileNotFoundError:
        raise UserError(f"there is no job file {path}", mend=("name an existing job.toml",)) from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}", str(path)) from None
    except ValueError as error:
        raise UserError(f"{path} can't be read: {error}", str(path), _as_utf8(path, str(error))) from None
    try:
        return parse_toml(text)
    except ValueError as error:
        raise _word_and_table(text, path) or UserError(
            f"{path} is not TOML: {error}", str(path), _KEY_OR_VALUE
        ) from None


def _as_utf8(path: Path, problem: str) -> tuple[str, ...]:
    if "UTF-8" not in problem:
        return ("name a job.toml: a file of some lines of text",)
    encoding = "GBK" if "GBK" in problem else "ITS_ENCODING"
    return (
        "save it as UTF-8 in your editor",
        f"or: iconv -f {encoding} -t UTF-8 {path.name} > job-utf8.toml",
    )


def _word_and_table(text: str, path: Path) -> UserError | None:
    """What to say where a section is given as one word and has options of its own besides, which TOML can't hold."""
    for section, main in ONE_WORD.items():
        word = re.search(rf"^[ \t]*{section}[ \t]*=[ \t]*(?P<value>[^\s{{][^\n#]*)", text, re.MULTILINE)
        table = re.search(rf"^[ \t]*(\[[ \t]*{section}[ \t]*[\].]|{section}[ \t]*\.)", text, re.MULTILINE)
        if word and table:
            lines = [text.count("\n", 0, found.start()) + 1 for found in (word, table)]
            value = word["value"].strip()[:80]
            return UserError(
                f"{section} is a name on line {lines[0]} and a table on line {lines[1]}; TOML takes one or the other",
                f"{path}, line {lines[0]}",
                (
                    f"write the name into the table: [{section}], and below it {main} = {value}",
                    f"remove line {lines[0]}",
                ),
            )
    return None
