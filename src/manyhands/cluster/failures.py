"""The failure of a process as an exception in the process and as an error for the user."""

import platform
import re

from manyhands.core.errors import EXIT_USAGE, ManyhandsError, RunError, UserError
from manyhands.core.records import Failure


class Failed(Exception):  # noqa: N818 - it carries a failure, it isn't one
    """Ends a process that has written its failure record."""

    def __init__(self, record: Failure) -> None:
        super().__init__(record.what)
        self.record = record


def users_place(record: Failure) -> str:
    """Returns file:line of the user's own code in a failure; empty without one."""
    lines = re.findall(r'File "([^"\n]+)", line (\d+)', record.excerpt)
    return ":".join(lines[-1]) if lines else ""


def as_error(record: Failure) -> ManyhandsError:
    """Makes an error for the user, with the lines of the traceback that are in their own files."""
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
