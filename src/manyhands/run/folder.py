"""Opens, locks and watches a run folder, and loads the job of a run that is resumed."""

import contextlib
import fcntl
import itertools
import os
import re
import shlex
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from manyhands.checkpoint import trained
from manyhands.checkpoint.folders import read_state
from manyhands.cluster.agents import folders
from manyhands.cluster.code_files import holds_run
from manyhands.cluster.hosts.this_process import machines_of
from manyhands.config import load
from manyhands.config.job import ClusterOptions, Job
from manyhands.core import stops, terminal, timeouts
from manyhands.core.errors import EXIT_DOCTOR, EXIT_USAGE, ManyhandsError, UserError
from manyhands.core.files import private_files, unused_path
from manyhands.core.run_folder import RunFolder, parts_made_in_python, resume_command
from manyhands.report.read import read_run
from manyhands.run.registry import RUNS, find_reference, has_local_launcher, registered, saved_ssh_options

POLL_S = 1.0  # interval between checks of the folder
_MAY_NAME_CODE = (  # options whose values may name the user's code, in this order
    "model.name", "data.name", "data.held_out", "train.loss", "train.optimizer", "train.schedule", "train.metrics",
)  # fmt: skip


@contextlib.contextmanager
def run_folder(job: Job) -> Iterator[RunFolder]:
    """Context manager that opens and locks the run folder of a job. Deletes a new folder after a usage error."""
    base = Path(job.run.out).expanduser() if job.run.out else RUNS
    missing = [place for place in (base, *base.parents) if not place.exists()]
    with private_files():
        folder, lock = _open_folder(job)
        topmost = missing[-1] if missing else None if job.run.out else folder.path
        try:
            names = [machine.name for machine in machines_of(job.cluster)]
            with registered(folder.path, names), stops.stop_signals_as_ctrl_c():
                yield folder
        except ManyhandsError as error:
            if error.exit_code in {EXIT_USAGE, EXIT_DOCTOR} and topmost and not folder.metrics.exists():
                shutil.rmtree(folder.path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    for place in itertools.takewhile(topmost.parent.__ne__, folder.path.parents):
                        place.rmdir()
            raise
        finally:
            if lock:
                lock.release()


def new_run_path(job: Job) -> Path:
    """Returns run.out if it is set, otherwise the first unused path of runs/<date>-<data>-<model>, …-2, …-3."""
    if job.run.out:
        return Path(job.run.out)
    names = (job.run.script[0], "script") if job.run.script else (job.data.name, job.model.name)
    plain = [word.removeprefix("torchvision:").split(":")[0] for word in names]
    words = [re.sub(r"[^\w.-]+", "-", Path(word).stem).strip("-") or "run" for word in plain]
    stem = f"{datetime.now():%Y-%m-%d}-{words[0]}-{words[1]}"
    for number in range(1, 10_000):
        path = RUNS / (stem if number == 1 else f"{stem}-{number}")
        if not os.path.lexists(path):
            return path
    raise UserError("all 10,000 run names for today are in use", str(RUNS), ("choose a run folder: --out DIR",))


def _open_folder(job: Job) -> tuple[RunFolder, FileLock | None]:
    """Opens and locks the folder of a new or resumed run, and writes job.toml; returns (folder, lock or None)."""
    folder = folders.use_run_folder(Path(job.run.out).expanduser()) if job.run.out else None
    while folder is None:
        path = new_run_path(job)
        # Another run may have just created the folder.
        with folders.writing_into(path), contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            folder = RunFolder(path)
    if job.run.out and folder.exists() and job.checkpoint.resume == "never":
        raise UserError(f"{folder.path} already contains a run", "--out", ("use --resume auto", "or use a new --out"))
    with folders.writing_into(folder.path):
        # `resume --no-detach` also takes over a detached run.
        detached = "detach" in job.cluster.flags and folder.exists() and load.read_toml(folder.job).get("cluster", {})
        lock = _lock_folder(folder, takes_over=job.cluster.detach or bool(detached and detached.get("detach")))
        if not folder.exists() or job.run.script:
            # The job file of an earlier run is replaced later, after all checks (see worker/run_metadata.py).
            folders.replace_job(folder, tomli_w.dumps(job.model_dump(mode="json")))
    return folder, lock


def active_run_error(folder: RunFolder, *more: str) -> UserError:
    hints = (f"wait until the run ends, or stop the run: manyhands stop {shlex.quote(str(folder.path))}", *more)
    return UserError(f"a run is active in {folder.path}", "--out" if more else str(folder.path), hints)


def _lock_folder(folder: RunFolder, *, takes_over: bool) -> FileLock | None:
    folder.ranks.mkdir(exist_ok=True)
    takes_over = takes_over and not has_local_launcher(folder.path)
    try:
        if takes_over:
            folders.advance_term(folder.ranks, folders.Term(folders.read_term(folder.ranks).head + 1))
        lock = folders.claim_run_folder(folder, patience_s=timeouts.MAKE_WAY_S if takes_over else 0)
    except Timeout:
        raise active_run_error(folder, "or choose another --out") from None
    if not folders.run_id(folder):
        folders.set_run_id(folder)
    folder.failures.mkdir(exist_ok=True)
    for stale in folder.failures.glob("*.json"):
        stale.unlink()
    return lock


class FolderWatch:
    """Detects that a run folder was renamed or deleted.

    A renamed folder gets a symbolic link at its old path, through which all processes continue to write. A deleted
    folder is created again with job.toml and other small files, and the run is asked to save and stop.
    """

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        self._name, self._path, self._warn = path, path.absolute(), warn
        self._contents: dict[Path, bytes] = {}
        self._next_check_at = 0.0
        self._deleted = self._stop_is_due = False
        self._open_folder()

    def check(self) -> None:
        """Checks, at most once a second, that the path still leads to the opened folder. Ignores errors of the disk."""
        if time.monotonic() < self._next_check_at:
            return
        self._next_check_at = time.monotonic() + POLL_S
        with contextlib.suppress(OSError):
            self._compare_path()
        if self._stop_is_due and stops.request_stop():
            self._stop_is_due = False

    def _compare_path(self) -> None:
        folder = RunFolder(self._path)
        missing = self._missing_files(folder)
        if missing == [folder.job]:
            time.sleep(0.05)  # the file is missing while it is replaced
            missing = self._missing_files(folder)
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
        elif place := self._new_path():
            self._link_old_path(place)
        else:
            self._restore_folder(folder)

    def _missing_files(self, folder: RunFolder) -> list[Path]:
        """Returns the watched files and folders that are missing: all of them if the path leads to another folder."""
        known = [*self._contents, *({folder.job, folder.ranks} - self._contents.keys())]
        here = self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        return [path for path in known if not (here and path.exists())]

    def _link_old_path(self, place: Path) -> None:
        if self._path.is_symlink():
            self._path.unlink()
        elif self._path.exists():  # created by a process that was saving, or by another run
            self._path.rename(unused_path(place, "written-while-moved"))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.symlink_to(place)
        self._warn(f"{self._name} was moved to {place}; the run continues there, with a link at the old path")

    def _restore_folder(self, folder: RunFolder) -> None:
        folder.failures.mkdir(parents=True, exist_ok=True)
        for file, content in self._contents.items():
            file.write_bytes(content)
        self._close()
        self._open_folder()
        if not self._deleted:  # a deletion may be detected several times
            self._deleted = self._stop_is_due = True
            self._warn(f"{self._name} was deleted: its records and checkpoints are lost. Saving and stopping")

    def _open_folder(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def _new_path(self) -> Path | None:
        """Returns the path to which the opened folder was moved; None if the folder was deleted or emptied."""
        on_macos: int | None = getattr(fcntl, "F_GETPATH", None)
        if on_macos is not None:
            found = Path(os.fsdecode(fcntl.fcntl(self._descriptor, on_macos, bytes(1024)).rstrip(b"\0")))
        else:
            found = Path(f"/proc/self/fd/{self._descriptor}").readlink()
        holds = found != self._path and holds_run(found)
        return found if holds and os.path.samestat(found.stat(), os.fstat(self._descriptor)) else None


def read_network_record(checkpoint: Path) -> trained.TrainedNetwork | None:
    """Returns the description of the network in a checkpoint or its run, or None. Raises UserError if damaged."""
    return trained.find_record(checkpoint, read_state(checkpoint) if checkpoint.is_dir() else {})


def load_resumed(name: str, flags: Mapping[str, Any]) -> load.LoadedJob:
    """Loads the job of a run to resume, changed by `flags`. Raises UserError if the run is unknown or active."""
    folder = RunFolder(find_reference(name))
    if has_local_launcher(folder.path):
        raise active_run_error(folder)
    read_run(folder.path)
    loaded = load.load_job({"run.out": str(folder.path), "checkpoint.resume": "auto", **flags}, file=folder.job)
    announce_resumed(folder, loaded)
    return loaded


def announce_resumed(folder: RunFolder, loaded: load.LoadedJob) -> None:
    """Prints the files of user code that a resumed run will execute because job.toml names them.

    Raises UserError if the code belongs to another user, or if only a Python program can resume the run.
    """
    keys = {"data": "data.name", "network": "model.name"}
    lost = [what for what in parts_made_in_python(folder.path) if loaded.origins.get(keys[what]) == str(folder.job)]
    if lost:
        longer = 'to train longer, use epochs(20) of the session, or fit(…, epochs=20, checkpoint__resume="auto")'
        hints = (f"to resume, run {resume_command(folder.path)}", longer)
        what = f"this run can be resumed only by the Python program that creates its {' and '.join(lost)}"
        raise UserError(what, str(folder.path), hints)
    try:
        record = trained.find_record(folder.checkpoints / "any", {})
    except UserError:
        record = None  # the resumed run writes a new record
    values = load.flatten(loaded.job.model_dump())
    for key in _MAY_NAME_CODE:
        if loaded.origins.get(key) == str(folder.job):
            words = [values[key]] if isinstance(values[key], str) else values[key]
            load.announce(words, folder.path, record, f"--set {key}={{}}")


def announce_ssh_command(loaded: load.LoadedJob) -> None:
    """Prints the ssh command and the Python that job.toml names. Raises UserError if another user owns job.toml."""
    standard = ClusterOptions()
    for name in ("ssh", "python"):
        wanted, file = getattr(loaded.job.cluster, name), Path(loaded.origins.get(f"cluster.{name}", ""))
        known = {getattr(standard, name), (saved_ssh_options(file.parent) or {}).get(name)}
        if wanted in known or not file.is_file() or not machines_of(loaded.job.cluster):
            continue
        load.refuse_other_users(shlex.quote(wanted), file, file, f"--set cluster.{name}={shlex.quote(wanted)}")
        if RunFolder(file.parent).ranks.is_dir():
            terminal.say(f"connecting to the machines with {shlex.quote(wanted)}, as specified in {file}")
