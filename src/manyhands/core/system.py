"""The operating systems that manyhands runs on."""

from importlib.util import find_spec

from manyhands.core.errors import UserError


def require_system() -> None:
    """Refuses a system without the file locks and process groups that a run relies on, before anything else fails.

    Raises:
        UserError: this is such a system: Windows.
    """
    if find_spec("fcntl") is None:
        what = "manyhands runs on Linux, on macOS, and on Windows within WSL2; this Python has no fcntl"
        raise UserError(what, mend=("in PowerShell: wsl --install, then install manyhands in there",))
