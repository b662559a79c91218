"""Finds the place that a user's word stands for: a run by a part of its name, or a checkpoint."""

from pathlib import Path

from manyhands.run.watch import find_run


def find_reference(word: str) -> Path:
    """A run's folder by any of its names, or the place itself of a checkpoint or file.

    Raises:
        UserError: nothing of that name is there, or several are.
    """
    place = Path(word).expanduser()
    return place if place.exists() else find_run(word).path


def find_start(word: str | None) -> str | None:
    """The value of --resume with a run's short name as its folder; "auto", "never" and places stay as they are.

    Raises:
        UserError: the word stands for no run, or for several.
    """
    files = (".tar", ".pth", ".pt", ".ckpt", ".safetensors")
    if not word or word in {"auto", "never"} or "/" in word or word.endswith(files) or Path(word).exists():
        return word
    return str(find_reference(word))
