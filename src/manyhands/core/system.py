"""Which systems manyhands runs on, and in which languages."""

import os
from importlib.util import find_spec

from manyhands.core import catalogue
from manyhands.core.errors import UserError


def require_system() -> None:
    """Refuses a system without the file locks and process groups that a run relies on, before anything else fails.

    Raises:
        UserError: this is such a system: Windows.
    """
    if find_spec("fcntl") is None:
        what = "manyhands runs on Linux, on macOS, and on Windows within WSL2; this Python has no fcntl"
        raise UserError(what, mend=("in PowerShell: wsl --install, then install manyhands in there",))


def require_language() -> None:
    """Raises UserError: MANYHANDS_LANG names a language without a catalogue, or a catalogue that can't be read."""
    language = os.environ.get(catalogue.LANGUAGE, "")
    if language in catalogue.ENGLISH:
        return
    try:
        catalogue.read_catalogue(language)
    except (OSError, ValueError) as error:
        have = sorted(path.parent.parent.name for path in catalogue.FOLDER.glob("*/LC_MESSAGES/*.mo"))
        mend = (f"there are: {', '.join(['en', *have])}", f"or leave {catalogue.LANGUAGE} out: English")
        why = "it isn't there" if isinstance(error, FileNotFoundError) else str(error)
        raise UserError(f"the texts of {language} can't be used: {why}", catalogue.LANGUAGE, mend) from error
