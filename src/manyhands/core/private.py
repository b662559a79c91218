"""What a run writes is its user's alone; what users may share, data sets and caches, keeps their own permissions."""

import os
from collections.abc import Generator
from contextlib import contextmanager

# The masks that were in force before, the user's own first.
_before: list[int] = []


@contextmanager
def private_files() -> Generator[None]:
    """New files and folders of this process and of those that it forks can be read by their owner alone."""
    _before.append(os.umask(0o077))
    try:
        yield
    finally:
        os.umask(_before.pop())


@contextmanager
def usual_files() -> Generator[None]:
    """New files and folders are as the user's own umask says, also within `private_files`."""
    if not _before:
        yield
        return
    previous = os.umask(_before[0])
    try:
        yield
    finally:
        os.umask(previous)


def usual_umask() -> int:
    """The user's own umask for a process that is started; -1 where it is in force."""
    return _before[0] if _before else -1
