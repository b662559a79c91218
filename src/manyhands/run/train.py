"""Starts a training run and watches it to its end, whatever way its processes meet."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from manyhands.checkpoint.folders import resolve
from manyhands.cluster.agents.claim import Term, claim, new_holder, raise_term, run_id, set_run_id, term_in
from manyhands.cluster.agents.debugger import attach_notice
from manyhands.cluster.agents.early import FILES, FILES_EACH, end_early, raise_file_limit
from manyhands.cluster.agents.ending import Ending, first_cause
from manyhands.cluster.agents.supervise import Watch, supervise_once
from manyhands.cluster.failures import Failed, as_error
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.cluster.hosts.machines import machines_of
from manyhands.cluster.hosts.this_process import LaunchDecision, RankOutsideError, participate, refuse_unfollowed
from manyhands.config.job import Job
from manyhands.config.load import read_toml
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
from manyhands.core.files import private_files
from manyhands.core.mesh import parse_mesh
from manyhands.core.resuming import OBJECTS, kept_step, names_resume, resume_command
from manyhands.core.run_folder import NOWHERE, RunFolder, use_run_folder, write_job, writing_into
from manyhands.core.scratch import scratch
from manyhands.core.shares import check_batch
from manyhands.core.stops import ended_like_ctrl_c
from manyhands.core.terminal import say
from manyhands.core.user_code import refuse_no_code
from manyhands.core.world import ProcessInfo
from manyhands.data.known import find_choice
from manyhands.models.published import check_network
from manyhands.parallel.options import check_mode
from manyhands.parallel.ports import describe_exposure, listen
from manyhands.report.read import RunData, read_run
from manyhands.report.screen import Screen
from manyhands.run.failure_log import ends_noted, interrupted, note_cause, note_head, starts_and_stops, stop_saved
from manyhands.run.folder_watch import FolderWatch
from manyhands.run.here import Here
from manyhands.run.load import load_worker
from manyhands.run.new_folder import free_run_folder, new_run_folder, remove_new, topmost_missing
from manyhands.run.recovery import Recovery
from manyhands.run.registry import headed_here, registered
from manyhands.run.script import note_end, shown, stopping
from manyhands.sync.choose import check_method

STOPPING = "stopping after the current update; press Ctrl-C again to end at once without saving"
RUNS = Path("runs")
LOOPBACK = "127.0.0.1"
# Processes of a detached run, which save and leave for a new head.
TAKE_OVER_S = 90.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: RunFolder  # the run folder
    status: str  # "finished" or "stopped"
    exit_code: int  # for the shell
    is_main: bool = True  # True on the process that should tell the user

    def read(self) -> RunData:
        """What the run left."""
        return read_run(self.folder.path)


def train(job: Job, *, quiet: bool = False, objects: Any = None, rendezvous: Rendezvous | None = None) -> Outcome:
    """Trains as the job says: starts processes here, or takes part in a group that somebody else formed.

    Args:
        job: what to do.
        quiet: no progress on standard error.
        objects: `train.job.Objects` of a user of the Python interface.
        rendezvous: this machine among others that each start their own processes; None: from flags and environment.

    Raises:
        ManyhandsError: the run failed; the first cause is in it.
    """
    decision = LaunchDecision(None, rendezvous=rendezvous) if rendezvous else place_of(job)
    if job.cluster.detach:
        hints = ("use manyhands launch --detach --hosts localhost …", "or remove cluster.detach")
        raise UserError("only manyhands launch can detach a run", "cluster.detach", hints)
    if decision.process_info:
        end_early()
        return train_in_process(job, decision.process_info, quiet=quiet, objects=objects)
    if job.cluster.debugging:
        say(attach_notice(job.cluster))
    rendezvous = decision.rendezvous or Rendezvous((decision.processes,))
    several = len(rendezvous.sizes) > 1
    _refuse_few_files(max(1, decision.processes))
    if not several:
        _refuse_missing(job, objects)
    if several:
        job = _among_machines(job, rendezvous, quiet=quiet)
    else:
        rendezvous = Rendezvous(rendezvous.sizes, devices=rendezvous.devices)
    private_folder = scratch("objects") if objects is not None else nullcontext(Path())
    with run_folder(job) as folder, private_folder as private:
        more, earlier = {"met": several, **_hand_over(objects, private)}, len(starts_and_stops(folder))
        with ends_noted(job, folder), closing(Screen(folder.path, quiet=quiet)) as screen:
            watch = watch_on(job, screen, shown(job, folder, screen, quiet=quiet))
            # Where no head watches all processes nobody starts them again; who stands still may yet go on.
            watch.evicts &= not several
            with closing(Here(folder, rendezvous, watch, more)) as here:
                recovery = Recovery(job, folder, screen.say)
                ending = supervise_once([here.link()], [here.orders(recovery)], watch)
                while not several and recovery.again(ending):
                    ending = supervise_once([here.link()], [here.orders(recovery)], watch)
        return replace(conclude(job, folder, ending, earlier), is_main=rendezvous.machine == 0)


def _refuse_few_files(processes: int) -> None:
    """Raises UserError where the system lets a process open too few files for a run."""
    needed = FILES + FILES_EACH * processes
    if (most := raise_file_limit(needed)) < needed:
        hints = (f"raise the limit: ulimit -n {needed}",)
        raise UserError(f"this run opens up to {needed} files per process, but the limit is {most}", "ulimit -n", hints)


def check_names(job: Job, *, data: bool = True, model: bool = True) -> None:
    """Looks up the data set, network, mode and method that a job names, without importing torch.

    `data` is False for objects and for folders that may be on another machine only, `model` for objects.

    Raises:
        UserError: one of them doesn't exist, or the batch or the mesh doesn't fit the number of processes.
    """
    if data:
        find_choice(job.data.name)
    if model:
        check_network(job.model.name, pretrained=job.model.pretrained)
    check_mode(job.parallel.mode)
    check_method(job.sync.method)
    count = job.cluster.processes
    if job.parallel.mesh and count and not (job.cluster.hosts or job.cluster.hostfile or job.cluster.world_size):
        parse_mesh(job.parallel.mesh).check_size(count)
    check_batch(job.train.batch, count)


def _refuse_missing(job: Job, objects: Any) -> None:
    """Raises UserError for what isn't on this machine, as far as that can be found before torch is loaded."""
    if job.run.script:
        return
    if job.cluster.device.partition(":")[0] == "gpu":
        hints = (
            "remove --device to detect the accelerator",
            "or use --device cuda (NVIDIA, AMD), npu, xpu, mps or cpu",
        )
        raise UserError("there is no device type gpu", "cluster.device", hints)
    check_names(job, data=job.data.name != OBJECTS, model=getattr(objects, "model", None) is None)
    code = {"data.name": job.data.name, "model.name": job.model.name, "train.loss": job.train.loss}
    for where, word in code.items():
        refuse_no_code(word, where)
    weights = Path(job.model.weights).expanduser()
    resumed = job.run.out and RunFolder(Path(job.run.out).expanduser()).has_checkpoints()
    if not (resumed or weights.exists()):
        resolve(weights, "best")


def place_of(job: Job) -> LaunchDecision:
    """How this process takes part; where its rank can't be, those that wait for it hear so before this raises.

    Raises:
        UserError: the flags or variables contradict each other or leave something out, or a flag can't be followed.
    """
    try:
        found = participate(job.cluster)
    except RankOutsideError as outside:
        load_worker("member").publish_invalid_rank(job, outside.process_info, outside.message)
        raise
    refuse_unfollowed(job.cluster, found)
    for words, option, value in found.requests:
        section, _, name = option.partition(".")
        if not option:
            say(f"{job.cluster.file}: {words} is not supported and is ignored")
        elif getattr(getattr(job, section), name) != value:
            say(f"{job.cluster.file}: {words} is ignored; to apply this setting, add --{option} {value}")
    return found


def _among_machines(job: Job, rendezvous: Rendezvous, *, quiet: bool) -> Job:
    """This machine's part of a job whose processes meet those that other machines start; rank 0's keeps the run."""
    if rendezvous.machine == 0 and not rendezvous.file:
        # Said only of what can be opened; the agent opens it.
        listen(rendezvous.address, rendezvous.port, "MASTER_ADDR and MASTER_PORT, or the cluster file").close()
        if not quiet:
            say(describe_exposure(rendezvous.address, rendezvous.port))
    if rendezvous.machine == 0:
        return job
    out = f"{job.run.out}.node{rendezvous.machine}" if job.run.out else ""
    return job.model_copy(update={"run": job.run.model_copy(update={"out": out, "report": False})})


def _hand_over(objects: Any, private: Path) -> dict[str, Any]:
    """Writes the user's live objects where only this user can read them."""
    if objects is None:
        return {}
    import cloudpickle

    path = private / "objects"
    path.write_bytes(cloudpickle.dumps(objects))
    return {"objects": str(path), "paths": [entry or str(Path.cwd()) for entry in sys.path]}


def watch_on(job: Job, screen: Screen, on_tick: Callable[[], None]) -> Watch:
    """What a run's screen wants to hear of while its head watches."""
    folder = FolderWatch(screen.folder, lambda text: screen.say(text, "WARNING"))

    def tick() -> None:
        folder.look()
        on_tick()

    return Watch(
        tick,
        lambda: screen.say(stopping(job, STOPPING)),
        lambda how: screen.say(how, "WARNING"),
        stalls=not job.cluster.debugging,
        evicts=job.cluster.recovers,
    )


def conclude(job: Job, folder: RunFolder, ending: Ending, earlier: int = 0) -> Outcome:
    """Report, exit code, or the first cause of a failure; for `earlier` see `stop_saved`."""
    if job.run.script:
        note_end(job, folder, ending)
    if not ending.ok:
        if ending.refused:
            note_head(job, folder, ending.refused)
            raise ending.refused
        if ending.interrupted == 1 and not job.run.script and stop_saved(folder, earlier) is not None:
            report_on(job, folder)
            return Outcome(folder, "stopped", EXIT_SAVED)
        first, codes = ending.interrupted == 1, ending.failed.values()
        # Workers that had not begun to train are ended by the stop's own signal. Their peers' failures follow from
        # that, as they follow from a second stop, which kills.
        unready, killed = first and -signal.SIGTERM in codes, first and -signal.SIGKILL in codes
        follows = unready or ending.interrupted > 1
        records = [record for record in ending.records.values() if not (follows and record.consequence)]
        if ending.interrupted and (ending.hung or not (records or killed)):
            idle = first and not (ending.hung or ending.lost) and (unready or not codes)
            error = interrupted(folder, ending.hung, idle=idle)
            report_on(job, folder)
            raise error
        cause, error = first_cause(ending), failure_of(folder, ending)
        if cause:
            note_cause(folder, cause)
        else:
            note_head(job, folder, error)
        report_on(job, folder)
        raise error
    if job.run.script:
        return Outcome(folder, "finished", EXIT_OK)
    statuses = {value["status"] for value in ending.returned.values()}
    status = "stopped" if "stopped" in statuses else "finished"
    report_on(job, folder)
    return Outcome(folder, status, EXIT_SAVED if status == "stopped" else EXIT_OK)


def failure_of(folder: RunFolder, ending: Ending) -> ManyhandsError:
    """The first cause as an error for the user."""
    if ending.refused:
        return ending.refused
    cause = first_cause(ending)
    if cause is None:
        where = str(folder.ranks / "agent.log")
        return RunError(f"the agent that watches the processes failed: {ending.broken}", where, _resume_hint(folder))
    return _with_line(as_error(cause), folder)


def _with_line(error: ManyhandsError, folder: RunFolder) -> ManyhandsError:
    """A failure's error with the line that goes on, unless it has one."""
    if error.exit_code == EXIT_FAILED and not any(map(names_resume, error.hints)):
        error.hints += _resume_hint(folder)
    return error


def _resume_hint(folder: RunFolder) -> tuple[str, ...]:
    """The line that goes on with a run that has failed, where something was saved."""
    step = kept_step(folder)
    command = resume_command(folder.path)
    resume_hint = f"resume from the last checkpoint, of step {step}, with the same or other options: {command}"
    return (resume_hint,) if step is not None else ()


def report_on(job: Job, folder: RunFolder) -> None:
    """The page; a failure to draw it, or Ctrl-C, must not fail the run, and is said."""
    if not job.run.report or not folder.metrics.is_file():
        return
    from manyhands.report.page import write_report

    try:
        write_report(folder.path)
    except (OSError, ValueError, RuntimeError) as error:
        say(f"report.html could not be written: {error}")
    except KeyboardInterrupt:  # the run itself has ended, and is told of as it has
        say(f"report.html is not written; to write the report, run manyhands report {shlex.quote(str(folder.path))}")


@contextmanager
def run_folder(job: Job) -> Iterator[RunFolder]:
    """The run folder; one that is new goes again when the user's mistake ends the run before its first update."""
    base = Path(job.run.out).expanduser() if job.run.out else RUNS
    missing = topmost_missing(base)
    with private_files():
        folder, lock = open_folder(job)
        topmost = missing or (folder.path if not job.run.out else None)
        try:
            names = [machine.name for machine in machines_of(job.cluster)]
            with registered(folder.path, names), ended_like_ctrl_c():
                yield folder
        except ManyhandsError as error:
            if error.exit_code in {EXIT_USAGE, EXIT_DOCTOR} and topmost and not folder.metrics.exists():
                remove_new(folder.path, topmost)
            raise
        finally:
            if lock:
                lock.release()


def _words_of(job: Job) -> tuple[str, str]:
    return (job.run.script[0], "script") if job.run.script else (job.data.name, job.model.name)


def folder_to_be(job: Job) -> Path:
    """The folder that a run of this job would be kept in if it began now."""
    return Path(job.run.out) if job.run.out else free_run_folder(RUNS, *_words_of(job), datetime.now())


def open_folder(job: Job) -> tuple[RunFolder, FileLock | None]:
    """The run folder, new or gone on with, with the whole job in it, and a lock that keeps other runs out of it.

    Raises:
        UserError: it can't be used, or holds a run that the user doesn't want to go on with.
    """
    if not job.run.out:
        folder = new_run_folder(RUNS, *_words_of(job), datetime.now())
    else:
        folder = use_run_folder(Path(job.run.out).expanduser())
        if folder.exists() and job.checkpoint.resume == "never":
            raise UserError(f"{folder.path} already holds a run", "--out", ("use --resume auto", "or another --out"))
    with writing_into(folder.path):
        # `resume --no-detach` takes a detached run over too.
        detached = "detach" in job.cluster.flags and folder.exists() and read_toml(folder.job).get("cluster", {})
        lock = _claim(folder, takes_over=job.cluster.detach or bool(detached and detached.get("detach")))
    if not folder.exists() or job.run.script:
        # An earlier run's job file is replaced only once everything is known to fit (see worker/run_metadata.py).
        write_job(folder, tomli_w.dumps(job.model_dump(mode="json")))
    return folder, lock


def already_running(folder: RunFolder, *more: str) -> UserError:
    """What is said of a folder that a run is at work in."""
    hints = (f"wait for its end, or stop the run: manyhands stop {shlex.quote(str(folder.path))}", *more)
    return UserError(f"a run is active in {folder.path}", "--out" if more else str(folder.path), hints)


def _claim(folder: RunFolder, *, takes_over: bool) -> FileLock | None:
    folder.ranks.mkdir(exist_ok=True)
    takes_over = takes_over and not headed_here(folder.path)
    try:
        if takes_over:
            raise_term(folder.ranks, Term(term_in(folder.ranks).head + 1))
        lock = claim(folder, new_holder(), *((TAKE_OVER_S, TAKE_OVER_S) if takes_over else ()))
    except Timeout:
        raise already_running(folder, "or choose another --out") from None
    if not run_id(folder):
        set_run_id(folder)
    folder.failures.mkdir(exist_ok=True)
    for stale in folder.failures.glob("*.json"):
        stale.unlink()
    return lock


def train_in_process(job: Job, process_info: ProcessInfo, *, quiet: bool, objects: Any) -> Outcome:
    """Takes part as the process that this is: under torchrun, with --init, or on its own in Python."""
    # What torch's C++ parts log, each error with fifty lines of addresses, they raise as well.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if process_info.rank:
        notify = (
            say if process_info.started_by == "--init" else lambda _text: None
        )  # under a launcher rank 0 alone speaks
        with private_files():
            result = _take_part(job, process_info, NOWHERE, objects, notify)
        return _outcome(RunFolder(Path(result["folder"])), result, is_main=False)
    with run_folder(job) as folder:
        screen = _ScreenThread(folder, quiet=quiet)
        try:
            result = _take_part(job, process_info, folder, objects, say)
        finally:
            screen.close()
        report_on(job, folder)
        return _outcome(folder, result, is_main=True)


def _take_part(
    job: Job, process_info: ProcessInfo, folder: RunFolder, objects: Any, say: Callable[[str], None]
) -> dict[str, Any]:
    try:
        return load_worker("entry").train_here(job, process_info, folder, {"live": objects}, say)
    except Failed as failed:
        if process_info.rank == 0:
            note_cause(folder, failed.record)
        if failed.record.exit_code == EXIT_INTERRUPTED and process_info.rank == 0:
            raise interrupted(folder) from None
        error = as_error(failed.record)
        raise (error if process_info.rank else _with_line(error, folder)) from failed.__cause__


def _outcome(folder: RunFolder, result: dict[str, Any], *, is_main: bool) -> Outcome:
    stopped = result["status"] == "stopped"
    return Outcome(folder, result["status"], EXIT_SAVED if stopped else EXIT_OK, is_main=is_main)


class _ScreenThread:
    """Draws the screen from the run folder while the same process trains."""

    def __init__(self, folder: RunFolder, *, quiet: bool) -> None:
        self._screen = Screen(folder.path, quiet=quiet)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        folder = FolderWatch(self._screen.folder, lambda text: self._screen.say(text, "WARNING"))
        while not self._over.wait(0.25):
            folder.look()
            with suppress(OSError):
                self._screen.update()

    def close(self) -> None:
        """Draws what came last and gives the terminal back."""
        self._over.set()
        self._thread.join(5)
        self._screen.update()
        self._screen.close()
