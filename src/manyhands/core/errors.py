"""Errors with a message, a location and hints, and the exit codes of the commands."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from manyhands.core.terminal import plain

MOST_CHARACTERS, MOST_LINES = 1_200, 30  # limits of one error, so that it fits on one screen

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DOCTOR = 3
EXIT_SAVED = 75
EXIT_INTERRUPTED = 130


@dataclass(eq=False)
class ManyhandsError(Exception):
    """An error with hints for the user. Line breaks and terminal escapes are removed from all texts."""

    message: str  # the error in one sentence
    where: str = ""  # the file, flag, host or rank of the error; empty if unknown
    hints: tuple[str, ...] = field(default=())  # one per line

    exit_code = EXIT_FAILED

    def __post_init__(self) -> None:
        self.message, self.where = _sanitized(self.message), _sanitized(self.where)
        hints = (self.hints,) if isinstance(self.hints, str) else tuple(self.hints)
        more = (f"… and {len(hints) - MOST_LINES} more",) if len(hints) > MOST_LINES else ()
        self.hints = (*map(_sanitized, hints[:MOST_LINES]), *more)
        super().__init__(self.message, self.where, self.hints)

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"  where: {self.where}")
        lines += [f"  {'do:   ' if number == 0 else '      '} {line}" for number, line in enumerate(self.hints)]
        return "\n".join(lines)


def _sanitized(text: str) -> str:
    text = plain(text)
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[: MOST_CHARACTERS * 3 // 4]} … {text[-MOST_CHARACTERS // 4 :]}"


def shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def first_names(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (" …" if len(names) > most else "")


class UserError(ManyhandsError):
    """Raised if the user's input is invalid, before anything is started or changed."""

    exit_code = EXIT_USAGE


class RunError(ManyhandsError):
    """Raised if a run fails after it has started."""


class PeerError(RunError):
    """Raised if processes are missing at rendezvous, or if another process has the same rank."""
