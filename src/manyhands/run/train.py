"""Starts a training run and watches it to its end, whatever way its processes meet."""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from manyhands.cluster.inventory import Meeting
from manyhands.cluster.machines import machines_of
from manyhands.cluster.orders import Orders
from manyhands.cluster.rendezvous import Participation, participate
from manyhands.cluster.start import open_here
from manyhands.cluster.supervise import Ending, Watch, first_cause, supervise
from manyhands.config.job import Job
from manyhands.core.errors import (
    EXIT_DOCTOR,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SAVED,
    EXIT_USAGE,
    ManyhandsError,
    RunError,
    UserError,
)
from manyhands.core.folder import RunFolder, new_run_folder, remove_new, topmost_missing, use_run_folder, write_job
from manyhands.core.records import MACHINE_LOST, Event, Failure, append, read_lines, write_json
from manyhands.core.registry import registered
from manyhands.core.world import Membership
from manyhands.parallel.ports import describe_exposure
from manyhands.report.page import write_report
from manyhands.report.read import RunData, read_run
from manyhands.report.terminal import Screen
from manyhands.run.worker import Failed, Say, as_error, train_here

WORK = "manyhands.run.worker:work"
STOPPING = "stopping after what is going on now, an update or an evaluation; Ctrl-C again ends at once, unsaved"
RUNS = Path("runs")
LOOPBACK = "127.0.0.1"
# Ranks other than 0 learn from it where the run is kept.
UNKNOWN = RunFolder(Path(os.devnull))


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        folder: the run folder.
        status: "finished" or "stopped".
        exit_code: for the shell.
        speaks: True on the process that should tell the user.
    """

    folder: RunFolder
    status: str
    exit_code: int
    speaks: bool = True

    def read(self) -> RunData:
        """What the run left."""
        return read_run(self.folder.path)


def train(job: Job, *, quiet: bool = False, objects: Any = None, meeting: Meeting | None = None) -> Outcome:
    """Trains as the job says: starts processes here, or takes part in a group that somebody else formed.

    Args:
        job: what to do.
        quiet: no progress on standard error.
        objects: `train.job.Objects` of a user of the Python interface.
        meeting: this machine among others that each start their own processes; None for what flags and environment say.

    Raises:
        ManyhandsError: the run failed; the first cause is in it.
    """
    participation = Participation(None, meeting=meeting) if meeting else participate(job.cluster)
    if participation.membership:
        return train_in_process(job, participation.membership, quiet=quiet, objects=objects)
    if participation.meeting and len(participation.meeting.sizes) == 1:
        alone = replace(participation.meeting, address=LOOPBACK, port=0)
        return _train_here(job, alone, quiet=quiet, objects=objects)
    if participation.meeting:
        return _train_among_machines(job, participation.meeting, quiet=quiet, objects=objects)
    return _train_here(job, Meeting((participation.processes,), 0, LOOPBACK, 0), quiet=quiet, objects=objects)


def _train_among_machines(job: Job, meeting: Meeting, *, quiet: bool, objects: Any) -> Outcome:
    """Starts this machine's processes, which meet those that other machines start; rank 0's keeps the run."""
    if meeting.machine == 0:
        if not quiet:
            _say(describe_exposure(meeting.address, meeting.port))
        return _train_here(job, meeting, quiet=quiet, objects=objects)
    out = f"{job.run.out}.node{meeting.machine}" if job.run.out else ""
    run = job.run.model_copy(update={"out": out, "report": False})
    outcome = _train_here(job.model_copy(update={"run": run}), meeting, quiet=quiet, objects=objects)
    return replace(outcome, speaks=False)


def _train_here(job: Job, meeting: Meeting, *, quiet: bool, objects: Any) -> Outcome:
    private_folder = tempfile.TemporaryDirectory(prefix="manyhands-") if objects is not None else nullcontext("")
    with run_folder(job) as folder, private_folder as private:
        argument = {
            "task": "train",
            "job": job.model_dump(mode="json"),
            "folder": str(folder.path.resolve()),
            "met": len(meeting.sizes) > 1,
        }
        argument.update(_hand_over(objects, Path(private)))
        ending = _run_agent(job, argument, meeting, folder, quiet=quiet)
        return conclude(job, folder, ending)


def _hand_over(objects: Any, private: Path) -> dict[str, Any]:
    """Writes the user's live objects where only this user can read them."""
    if objects is None:
        return {}
    import cloudpickle

    path = private / "objects"
    path.write_bytes(cloudpickle.dumps(objects))
    return {"objects": str(path), "paths": [entry or str(Path.cwd()) for entry in sys.path]}


def _run_agent(job: Job, argument: dict[str, Any], meeting: Meeting, folder: RunFolder, *, quiet: bool) -> Ending:
    orders = Orders(
        entry=WORK,
        argument=argument,
        logs=str(folder.ranks.resolve()),
        sizes=list(meeting.sizes),
        machine=meeting.machine,
        device=job.cluster.device,
        threads=job.cluster.threads,
        address=meeting.address,
        port=meeting.port,
        devices=list(meeting.devices),
    )
    screen = Screen(folder.path, quiet=quiet)
    try:
        link = open_here(folder.ranks / "agent.log")
        return supervise([link], [orders], Watch(screen.update, lambda: screen.say(STOPPING)))
    finally:
        screen.close()


def conclude(job: Job, folder: RunFolder, ending: Ending) -> Outcome:
    """Report, exit code, or the first cause of a failure."""
    if not ending.ok:
        if ending.refused:
            raise ending.refused
        if ending.interrupted and not ending.records:
            _report(job, folder)
            raise _interrupted()
        cause = first_cause(ending)
        if cause:
            _note_failure(folder, cause)
        _report(job, folder)
        raise failure_of(folder, ending)
    statuses = {value["status"] for value in ending.returned.values()}
    status = "stopped" if "stopped" in statuses else "finished"
    _report(job, folder)
    return Outcome(folder, status, EXIT_SAVED if status == "stopped" else EXIT_OK)


def _interrupted() -> ManyhandsError:
    error = ManyhandsError("stopped before anything could be saved", mend=("the last checkpoint, if any, is whole",))
    error.exit_code = EXIT_INTERRUPTED
    return error


def _note_failure(folder: RunFolder, cause: Failure) -> None:
    """The first cause in the run's diary, and in full where the process couldn't leave its record itself."""
    with suppress(OSError):
        append(
            folder.events, Event(time=cause.time, kind="failed", rank=cause.rank, step=cause.step, message=cause.what)
        )
        record = folder.failures / f"{cause.rank}.json"
        if not record.exists():
            write_json(record, cause)


def failure_of(folder: RunFolder, ending: Ending) -> ManyhandsError:
    """The first cause as an error for the user."""
    cause = first_cause(ending)
    go_on = (f"manyhands resume {folder.path} goes on from the last checkpoint",) if _has_saved(folder) else ()
    if cause is None:
        where = str(folder.ranks / "agent.log")
        return RunError(f"the agent that watches the processes failed: {ending.broken}", where, go_on)
    error = as_error(cause)
    if cause.exit_code == EXIT_FAILED and (not cause.where or cause.error == MACHINE_LOST):
        error.mend += go_on
    return error


def _has_saved(folder: RunFolder) -> bool:
    """True when there is a checkpoint, here or on the machine of rank 0."""
    return folder.has_checkpoints() or any(line.get("kind") == "saved" for line in read_lines(folder.events))


def _report(job: Job, folder: RunFolder) -> None:
    """The page; a failure to draw it must not fail the run, and is said."""
    if not job.run.report or not folder.metrics.is_file():
        return
    try:
        write_report(folder.path)
    except (OSError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"manyhands: no report: {error}\n")


@contextmanager
def run_folder(job: Job) -> Iterator[RunFolder]:
    """The run folder; one that is new goes again when the user's mistake ends the run before its first update."""
    base = Path(job.run.out).expanduser() if job.run.out else RUNS
    missing = topmost_missing(base)
    folder, lock = open_folder(job)
    topmost = missing or (folder.path if not job.run.out else None)
    try:
        with registered(folder.path, [machine.name for machine in machines_of(job.cluster)]):
            yield folder
    except ManyhandsError as error:
        if error.exit_code in {EXIT_USAGE, EXIT_DOCTOR} and topmost and not folder.metrics.exists():
            remove_new(folder.path, topmost)
        raise
    finally:
        lock.release()


def open_folder(job: Job) -> tuple[RunFolder, FileLock]:
    """The run folder, new or gone on with, with the whole job in it, and a lock that keeps other runs out of it.

    Raises:
        UserError: it can't be used, or holds a run that the user doesn't want to go on with.
    """
    if not job.run.out:
        folder = new_run_folder(RUNS, job.data.name, job.model.name, datetime.now())
    else:
        folder = use_run_folder(Path(job.run.out).expanduser())
        if folder.exists() and job.checkpoint.resume == "never":
            raise UserError(f"{folder.path} holds a run already", "--out", ("--resume auto", "or another --out"))
    folder.ranks.mkdir(exist_ok=True)
    lock = FileLock(folder.ranks / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        mend = ("wait for its end, or stop it with Ctrl-C there", "or another --out")
        raise UserError(f"a run is going on in {folder.path}", "--out", mend) from None
    folder.failures.mkdir(exist_ok=True)
    for stale in folder.failures.glob("*.json"):
        stale.unlink()
    if not folder.exists():
        # An earlier run's job file is replaced only once everything is known to fit (see worker.py).
        write_job(folder, tomli_w.dumps(job.model_dump(mode="json")))
    return folder, lock


def train_in_process(job: Job, membership: Membership, *, quiet: bool, objects: Any) -> Outcome:
    """Takes part as the process that this is: under torchrun, with --init, or on its own in Python."""
    # What torch's C++ parts log, each error with fifty lines of addresses, they raise as well.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if membership.rank:
        say = _say if membership.started_by == "--init" else _say_nothing
        result = _take_part(job, membership, UNKNOWN, objects, say)
        return _outcome(RunFolder(Path(result["folder"])), result, speaks=False)
    with run_folder(job) as folder:
        screen = _ScreenThread(folder, quiet=quiet)
        try:
            result = _take_part(job, membership, folder, objects, _say)
        finally:
            screen.close()
        _report(job, folder)
        return _outcome(folder, result, speaks=True)


def _take_part(job: Job, membership: Membership, folder: RunFolder, objects: Any, say: Say) -> dict[str, Any]:
    try:
        return train_here(job, membership, folder, {"live": objects}, say)
    except Failed as failed:
        if membership.rank == 0:
            _note_failure(folder, failed.record)
        raise as_error(failed.record) from failed.__cause__


def _outcome(folder: RunFolder, result: dict[str, Any], *, speaks: bool) -> Outcome:
    stopped = result["status"] == "stopped"
    return Outcome(folder, result["status"], EXIT_SAVED if stopped else EXIT_OK, speaks=speaks)


def _say(text: str) -> None:
    sys.stderr.write(f"manyhands: {text}\n")
    sys.stderr.flush()


def _say_nothing(_text: str) -> None:
    """Ranks other than 0 keep silent under a launcher."""


class _ScreenThread:
    """Draws the screen from the run folder while the same process trains."""

    def __init__(self, folder: RunFolder, *, quiet: bool) -> None:
        self._screen = Screen(folder.path, quiet=quiet)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        while not self._over.wait(0.25):
            with suppress(OSError):
                self._screen.update()

    def close(self) -> None:
        """Draws what came last and gives the terminal back."""
        self._over.set()
        self._thread.join(5)
        self._screen.update()
        self._screen.close()
