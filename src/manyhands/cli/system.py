"""Check that the operating system is supported."""

from importlib.util import find_spec

from manyhands.core.errors import UserError


def require_system() -> None:
    """Raises UserError on Windows, which lacks the file locks and process groups that a run needs."""
    if find_spec("fcntl") is None:
        what = "manyhands runs on Linux, macOS and WSL2 on Windows, but this Python has no fcntl"
        raise UserError(what, hints=("run wsl --install in PowerShell, then install manyhands inside WSL",))
