"""Freed memory that a process keeps for its next update, in the place of giving it back to the system."""

import ctypes

# Source: mallopt(3). What is larger is taken from the system each time.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER, _MOST_BYTES = -1, 1 << 30


def keep_freed_memory() -> None:
    """Has the C library of Linux keep what was freed, large pieces too, for the rest of this process's life.

    By default it gives an activation back as soon as it is freed, and the system clears every page of it anew in the
    next update. Elsewhere nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _MOST_BYTES)
