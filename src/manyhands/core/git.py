"""What git knows of a folder, asked so that nothing runs that the folder's own configuration names.

A work tree's .git/config may name programs: for its file system's changes, for filters, for fetching what is missing.
Whoever wrote the folder wrote that too, and we only look at it.
"""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from manyhands.core.scratch import scratch

PATIENCE_S = 10.0
# For questions that the work tree's own configuration has to be read for: no program of it is run.
_QUIET = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never")


def revision(folder: Path) -> str:
    """The short name of the commit that a folder is at, with "+" where tracked files differ; empty without git."""
    with suppress(OSError, subprocess.SubprocessError):
        top, commit, objects, index, short = _lines(
            _ask(folder, "rev-parse", "--show-toplevel", "HEAD", "--git-path", "objects", "--git-path", "index"),
            _ask(folder, "rev-parse", "--short", "HEAD"),
        )
        return short + ("+" if _differs(Path(top), commit, folder / objects, folder / index) else "")
    return ""


def listed_files(folder: Path) -> list[Path] | None:
    """What git tracks of a folder or would add; None where it is no work tree's, or git can't say."""
    if not (folder / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        listed = _ask(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        return [folder / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return None


def _ask(folder: Path, *words: str) -> bytes:
    command = ["git", "-C", str(folder), *_QUIET, *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S, env=_environment()).stdout


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", **more}


def _lines(*answers: bytes) -> list[str]:
    """The lines of all answers; five of them, or git said something else than expected."""
    found = [os.fsdecode(line) for answer in answers for line in answer.splitlines()]
    if len(found) != 5:
        raise subprocess.SubprocessError("git answered in another way")
    return found


def _differs(top: Path, commit: str, objects: Path, index: Path) -> bool:
    """Whether tracked files differ from a commit, by a repository made for this question, which has no configuration.

    Filters and file system monitors have no program in it, and submodules aren't entered.
    """
    with scratch("git") as private:
        for name in ("objects", "refs"):
            (private / name).mkdir()
        (private / "HEAD").write_text(commit + "\n", encoding="utf-8")
        if not index.is_file():
            return False
        shutil.copy(index, private / "index")
        where = _environment(GIT_DIR=str(private), GIT_WORK_TREE=str(top), GIT_OBJECT_DIRECTORY=str(objects.resolve()))
        for words in (["update-index", "-q", "--refresh"], ["diff-index", "--quiet", "--ignore-submodules", commit]):
            done = subprocess.run(
                ["git", *_QUIET, *words], cwd=top, env=where, capture_output=True, check=False, timeout=PATIENCE_S
            )
        return done.returncode == 1
