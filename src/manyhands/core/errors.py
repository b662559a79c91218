"""What can go wrong, as a user should read it: what, where, what to do."""

from dataclasses import dataclass, field

from manyhands.core.shown import plain

# Of one error, so that it stays a screen whatever was wrong.
MOST_CHARACTERS, MOST_LINES = 1_200, 30

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DOCTOR = 3
EXIT_SAVED = 75
EXIT_INTERRUPTED = 130


@dataclass(eq=False)
class ManyhandsError(Exception):
    """An error with a mend. What others wrote in its words is plain text from the start: one line, no escapes.

    Attributes:
        what: one sentence that says what is wrong.
        where: the file, flag, host or rank it was found at; empty if there is none.
        mend: what the user can do, one line each.
    """

    what: str
    where: str = ""
    mend: tuple[str, ...] = field(default=())

    exit_code = EXIT_FAILED

    def __post_init__(self) -> None:
        """Keeps the exception's own arguments in step, so that it can be pickled and printed."""
        self.what, self.where = _quotable(self.what), _quotable(self.where)
        mend = (self.mend,) if isinstance(self.mend, str) else tuple(self.mend)
        more = (f"… and {len(mend) - MOST_LINES} more",) if len(mend) > MOST_LINES else ()
        self.mend = (*map(_quotable, mend[:MOST_LINES]), *more)
        super().__init__(self.what, self.where, self.mend)

    def __str__(self) -> str:
        """The error as text of a few lines."""
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        lines += [f"  {'do:   ' if number == 0 else '      '} {line}" for number, line in enumerate(self.mend)]
        return "\n".join(lines)


def _quotable(text: str) -> str:
    """A text as a screen shows it: one line, of which the middle is left out where it is endless."""
    text = plain(text)
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[: MOST_CHARACTERS * 3 // 4]} … {text[-MOST_CHARACTERS // 4 :]}"


def shortened(text: str, most: int = 80) -> str:
    """A text from outside as an error quotes it: at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


class UserError(ManyhandsError):
    """The user's own input is wrong; nothing was started or changed."""

    exit_code = EXIT_USAGE


class RunError(ManyhandsError):
    """A run began and could not go on."""


class PeerError(RunError):
    """Processes that should take part did not arrive, or an earlier process holds their place."""
