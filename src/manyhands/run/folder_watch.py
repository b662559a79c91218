"""Follows a run folder that is renamed or deleted while its run trains."""

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from manyhands.core.files import free_name
from manyhands.core.run_folder import RunFolder, holds_run
from manyhands.core.stops import request_stop

# Seconds between two looks, and how long a job file may be missing while it is replaced.
POLL_S, REPLACING_S = 1.0, 0.05


class FolderWatch:
    """Detects that a run folder was renamed or deleted.

    A renamed folder gets a link in its old place, so that all processes write into the new one. A deleted folder is
    made again with the same small files and the run is asked to stop, so that it saves and can be resumed.

    Args:
        path: the run folder.
        warn: receives a sentence about each change.
    """

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        self._name, self._path, self._warn = path, path.absolute(), warn
        self._contents: dict[Path, bytes] = {}
        self._look_at = 0.0
        self._deleted = self._stop_is_due = False
        self._open_folder()

    def look(self) -> None:
        """Compares the path with the folder that was opened; once a second at most.

        A file system that doesn't answer is asked again later.
        """
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + POLL_S
        with contextlib.suppress(OSError):
            self._compare()
        if self._stop_is_due and request_stop():
            self._stop_is_due = False

    def _compare(self) -> None:
        folder = RunFolder(self._path)
        missing = self._missing(folder)
        if missing == [folder.job]:
            time.sleep(REPLACING_S)
            missing = self._missing(folder)
        if not {folder.job, folder.ranks} <= set(missing):
            for path in missing:
                if path == folder.ranks:
                    folder.failures.mkdir(parents=True)
                elif path in self._contents:
                    path.write_bytes(self._contents[path])
                else:
                    continue
                if not self._deleted:
                    self._warn(f"{self._name / path.name} was deleted and has been restored")
            files = (folder.job, folder.plan, folder.network, folder.environment)
            self._contents |= {file: file.read_bytes() for file in files if file.is_file()}
        elif place := self._new_place():
            self._link_to(place)
        else:
            self._make_again(folder)

    def _missing(self, folder: RunFolder) -> list[Path]:
        """Files and folders that were here and are not; all of them where the path leads elsewhere."""
        known = [*self._contents, *({folder.job, folder.ranks} - self._contents.keys())]
        here = self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        return [path for path in known if not (here and path.exists())]

    def _link_to(self, place: Path) -> None:
        if self._path.is_symlink():
            self._path.unlink()
        elif self._path.exists():  # made again by a process that was saving, or by another run
            self._path.rename(free_name(place, "written-while-moved"))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.symlink_to(place)
        self._warn(f"{self._name} was moved to {place}; the run continues there, with a link at the old path")

    def _make_again(self, folder: RunFolder) -> None:
        folder.failures.mkdir(parents=True, exist_ok=True)
        for file, content in self._contents.items():
            file.write_bytes(content)
        self._close()
        self._open_folder()
        if not self._deleted:  # a deletion may take several looks
            self._deleted = self._stop_is_due = True
            self._warn(f"{self._name} was deleted: its records and checkpoints are lost. Saving and stopping")

    def _open_folder(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def _new_place(self) -> Path | None:
        """Where the opened folder is now; None if it was deleted or emptied."""
        on_macos: int | None = getattr(fcntl, "F_GETPATH", None)
        if on_macos is not None:
            found = Path(os.fsdecode(fcntl.fcntl(self._descriptor, on_macos, bytes(1024)).rstrip(b"\0")))
        else:
            found = Path(f"/proc/self/fd/{self._descriptor}").readlink()
        holds = found != self._path and holds_run(found)
        return found if holds and os.path.samestat(found.stat(), os.fstat(self._descriptor)) else None
