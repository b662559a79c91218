"""Which checkpoints of a folder are sound, and which of them go."""

from pathlib import Path

from manyhands.checkpoint import commit, layout
from manyhands.checkpoint.verify import verify
from manyhands.core.errors import UserError

Stamp = tuple[tuple[str, int, int, int], ...]
# What this process wrote or hashed: names, inodes, sizes and times of the files as they were then.
_known_good: dict[Path, Stamp] = {}


def prune(folder: Path, keep: int, best: Path | None) -> list[Path]:
    """Deletes and gives what `save` made but the newest `keep` that verify, and the best; none until so many do."""
    removed: list[Path] = []
    kept = 0
    for path in layout.step_folders(folder):
        if kept >= keep and not (best is not None and path.name == best.name):
            if commit.remove(path):
                removed.append(path)
                _known_good.pop(path, None)
        elif verifies(path):
            kept += 1
    if folder.is_dir():
        removed += [path for path in folder.iterdir() if layout.is_temporary(path) and commit.sweep(path)]
    return removed


def remove_step(folder: Path, step: int) -> None:
    """Deletes the checkpoint of a step, where there is one that `save` made."""
    path = folder / layout.step_name(step)
    if path.is_dir() and commit.remove(path):
        _known_good.pop(path, None)


def verifies(path: Path) -> bool:
    """True for a sound checkpoint; hashed once in a process, then only if a file's inode, size or time changed."""
    try:
        stamp = _stamp(path)
        if _known_good.get(path) != stamp:
            verify(path)
            _known_good[path] = stamp
    except (UserError, OSError):
        _known_good.pop(path, None)
        return False
    return True


def remember(path: Path) -> None:
    """Notes that this process has just written and read back a whole checkpoint, so that it needs no hashing soon."""
    _known_good[path] = _stamp(path)


def _stamp(path: Path) -> Stamp:
    entries = [(entry.name, entry.stat()) for entry in sorted(path.iterdir())]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in entries)
