"""Where data lies on this machine."""

import os
from pathlib import Path

from platformdirs import user_cache_dir

from manyhands.data.options import DataOptions


def cache_folder() -> Path:
    """MANYHANDS_CACHE, or the user's cache folder as this system has it; not made here."""
    named = os.environ.get("MANYHANDS_CACHE", "")
    return Path(named).expanduser() if named else Path(user_cache_dir("manyhands"))


def data_folder(options: DataOptions) -> Path:
    """Where named data sets lie: the option, MANYHANDS_DATA, or below the cache; not made here."""
    named = options.dir or os.environ.get("MANYHANDS_DATA", "")
    return Path(named).expanduser() if named else cache_folder() / "data"
