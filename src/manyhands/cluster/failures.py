"""A process's failure on its way to the user: as what ends the process, and as an error for the screen."""

import platform
import re

from manyhands.core.errors import EXIT_USAGE, ManyhandsError, RunError, UserError
from manyhands.core.records import Failure


class Failed(Exception):  # noqa: N818 - it carries a failure, it isn't one
    """A process could not go on; carries its record."""

    def __init__(self, record: Failure) -> None:
        super().__init__(record.what)
        self.record = record


def users_place(record: Failure) -> str:
    """file:line of the user's own code that a failure came from; empty where it came from none."""
    lines = re.findall(r'File "([^"\n]+)", line (\d+)', record.excerpt)
    return ":".join(lines[-1]) if lines else ""


def as_error(record: Failure) -> ManyhandsError:
    """A failure's record as an error for the user's screen, with what of its traceback is the user's own."""
    step = f", step {record.step}" if record.step is not None else ""
    line = users_place(record)
    rank = f"rank {record.rank} on {record.host}{step}{record.phase and f' ({record.phase})'}"
    where = record.where or f"{rank}{line and f', at {line}'}"
    if record.where and record.host not in {"", record.where, platform.node()}:
        where += f" on {record.host}"
    kind = UserError if record.exit_code == EXIT_USAGE else RunError
    error = kind(record.what, where, tuple(record.hints))
    error.exit_code = record.exit_code
    if record.excerpt:
        error.add_note(record.excerpt)
    return error
