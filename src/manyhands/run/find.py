"""Finds runs and checkpoints by the names that users type."""

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

from manyhands.cluster.agents.claim import agents_work
from manyhands.core.choices import did_you_mean
from manyhands.core.errors import UserError
from manyhands.core.records import Running
from manyhands.core.resuming import resume_command
from manyhands.core.run_folder import RunFolder
from manyhands.core.terminal import say
from manyhands.report.read import RunData, newest_runs, no_run, read_run
from manyhands.run.registry import head_of, headless, running

RUNS = Path("runs")


def find_run(word: str, *, parts: bool = True, active: bool = False) -> RunFolder:
    """Returns the run named by a folder, its name, a part of the name, or "last".

    Args:
        word: as typed.
        parts: a part of the name suffices; otherwise its beginning is required, where the word may be a data set's.
        active: prefer active runs to ended ones.

    Raises:
        UserError: there is none, or there are several.
    """
    working = {Path(record.run): None for record in (*running(), *headless())}
    for folder in (RunFolder(Path(word).expanduser()), RunFolder(RUNS / word)):
        if word and (folder.exists() or folder.path.resolve() in working):
            return folder
    if word == "last":
        for newest in newest_runs((RUNS, Path()), list(working), 1):
            say(f"the last run is {newest}")
            return RunFolder(newest)
    known = {path.resolve(): path for path in (*(job.parent for job in RUNS.glob("*/job.toml")), *working)}.values()
    for paths in (working, known) if active else (known,):
        names = named_by(word, [path.name for path in paths], parts=parts)
        found = [path for path in paths if path.name in names]
        if len(found) > 1:
            raise UserError(f'"{word}" matches {len(found)} runs', word, tuple(map(str, found)))
        if found:
            return RunFolder(found[0])
    if "/" in word or Path(word).exists():
        raise no_run(Path(word))
    names = list(dict.fromkeys(sorted(path.name for path in known)))
    listed = f"runs: {', '.join(names[:8])}" if names else "start a run with manyhands train"
    hints = (did_you_mean(word, names), listed)
    raise UserError(f'no run is called "{word}"', word or "RUN", tuple(filter(None, hints)))


def named_by(word: str, names: Iterable[str], *, parts: bool = True) -> list[str]:
    """Returns the names equal to a word, else those that begin with it, else (with `parts`) those that contain it."""
    matches: list[Callable[[str], bool]] = [word.__eq__, lambda name: name.startswith(word), lambda name: word in name]
    found = ([name for name in sorted(set(names)) if fits(name)] for fits in matches[: 3 if parts else 2])
    return next(filter(None, found), []) if word else []


def read_named(word: str) -> RunData | None:
    """Reads the run of this name; None if there is none, so that the word may be a data set's.

    Raises:
        UserError: the run can't be read.
    """
    try:
        folder = find_run(word, parts=False)
    except UserError:
        return None
    return read_run(folder.path)


def find_reference(word: str) -> Path:
    """Returns a run's folder by any of its names, or the place itself of a checkpoint or file.

    Raises:
        UserError: nothing of that name is there, or several are.
    """
    place = Path(word).expanduser()
    return place if place.exists() else find_run(word).path


def find_start(word: str | None) -> str | None:
    """Returns the value of --resume with a run's name replaced by its folder; "auto", "never" and paths stay.

    Raises:
        UserError: the word stands for no run, or for several.
    """
    files = (".tar", ".pth", ".pt", ".ckpt", ".safetensors")
    if not word or word in {"auto", "never"} or "/" in word or word.endswith(files) or Path(word).exists():
        return word
    return str(find_reference(word))


def head_of_active(folder: RunFolder) -> Running:
    """Returns the launcher process of a run.

    Raises:
        UserError: there is none; the error says whether processes train without it.
    """
    if head := head_of(folder.path):
        return head
    run = shlex.quote(str(folder.path))
    if agents_work(folder.ranks):
        hints = (
            f"to take over the run, see manyhands why {run}",
            f"or save and stop the processes: manyhands stop {run}",
        )
        raise UserError("the launcher of the run is gone, but its processes still train", str(folder.path), hints)
    hints = (
        f"to see how the run ended: manyhands why {run}",
        f"to resume the run: {resume_command(folder.path)}",
        "to list active runs: manyhands ps",
    )
    raise UserError("the run is not active", str(folder.path), hints)
