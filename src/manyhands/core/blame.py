"""What of a traceback is the user's own: the lines of their files, without this package's, torch's and Python's."""

import functools
import site
import sysconfig
import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parent.parent)


def users_traceback(error: BaseException) -> str:
    """The traceback of an error as far as it runs through the user's own files; empty where it doesn't."""
    trace = traceback.TracebackException.from_exception(error)
    if not _keep_users(trace):
        return ""
    return "".join(trace.format()).rstrip()


def users_line(error: BaseException) -> str:
    """file:line of the innermost of the user's lines that an error went through, or an empty string."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    mine = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{mine[-1].filename}:{mine[-1].lineno}" if mine else ""


def _keep_users(trace: traceback.TracebackException) -> bool:
    """Drops all other frames from an error and from those that caused it; True where one of the user's is left."""
    trace.stack[:] = [frame for frame in trace.stack if _is_users(frame.filename)]
    found = bool(trace.stack) or issubclass(trace.exc_type or object, SyntaxError)
    for before in (trace.__cause__, trace.__context__):
        found |= before is not None and _keep_users(before)
    return found


def _is_users(filename: str) -> bool:
    return not filename.startswith(("<frozen ", *_libraries()))


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that the user didn't write: Python's own, installed packages, and this one."""
    paths = sysconfig.get_paths()
    found = {_PACKAGE, *site.getsitepackages(), *(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))}
    return tuple(f"{path.rstrip('/')}/" for path in sorted(found))
