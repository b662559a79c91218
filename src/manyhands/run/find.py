"""Finds what a user means by a word: a run under its short name, or a checkpoint's place."""

from pathlib import Path

from manyhands.run.watch import find_run


def find_reference(word: str) -> Path:
    """A run's folder by any of its names, or the place itself of a checkpoint or file.

    Raises:
        UserError: nothing of that name is there, or several are.
    """
    place = Path(word).expanduser()
    return place if place.exists() else find_run(word).path
