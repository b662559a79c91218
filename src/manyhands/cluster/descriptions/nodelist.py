"""Slurm's short notations: `node[01-03,7]` for names of machines, `2(x3),1` for numbers of tasks."""

import itertools
import math
import re

from manyhands.core.errors import UserError

# More machines than any cluster has: a list that is longer is a mistake or an attack.
MOST = 100_000
_PART = re.compile(r"(?P<plain>[^\[\],\s]+)|\[(?P<ranges>[^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?", re.ASCII)


def expand_hosts(text: str, where: str) -> list[str]:
    """The names of a list such as "a[01-03]b[1-2],c", varied from the right. Raises UserError: the list is broken."""
    hosts: list[str] = []
    for entry in _split(text, where):
        choices: list[list[str]] = []
        position = 0
        while position < len(entry):
            part = _PART.match(entry, position)
            if not part:
                raise _broken(text, where, entry[position:])
            choices.append([part["plain"]] if part["plain"] else _numbers(part["ranges"], text, where))
            position = part.end()
        if len(hosts) + math.prod(map(len, choices)) > MOST:
            raise _broken(text, where, entry)
        hosts += ("".join(words) for words in itertools.product(*choices))
    return hosts


def _split(text: str, where: str) -> list[str]:
    """The entries between the commas that no bracket holds."""
    entries = re.split(r",(?![^\[]*\])", text.strip())
    if not all(entries):
        raise _broken(text, where, "an empty name")
    return entries


def _numbers(ranges: str, text: str, where: str) -> list[str]:
    """The numbers of "01-03,7": 01, 02, 03, 7, as wide as a range's first one is written."""
    found: list[str] = []
    for written in ranges.split(","):
        match = _RANGE.fullmatch(written)
        if not match:
            raise _broken(text, where, f"[{ranges}]")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low) or int(high) - int(low) > MOST:
            raise _broken(text, where, f"[{ranges}]")
        found += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return found


def expand_counts(text: str, where: str) -> list[int]:
    """The numbers of a list such as "2(x3),1": 2, 2, 2, 1. Raises UserError: the list is broken."""
    found: list[int] = []
    for entry in text.strip().split(","):
        match = _COUNT.fullmatch(entry)
        if not match or int(match[2] or 1) > MOST:
            raise UserError(f'{where} is not a list such as "2(x3),1": "{text}"', where)
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _broken(text: str, where: str, at: str) -> UserError:
    what = f'{where} is not a list of machines such as "node[01-03,7],other": "{text}"'
    return UserError(what, f"{where}, at {at}", (f"scontrol show hostnames '{text}' shows what Slurm makes of it",))
