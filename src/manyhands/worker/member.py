"""The membership of a process in a run or task: rendezvous, failures of peers, and its own failure record."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from manyhands.checkpoint.saved import saved_step, unsaved
from manyhands.cluster.failures import as_error
from manyhands.config.job import ClusterOptions, Job
from manyhands.config.load import flatten
from manyhands.core import terminal
from manyhands.core.errors import EXIT_USAGE
from manyhands.core.records import FAILURE_FILE, Failure, write_json
from manyhands.core.run_folder import RunFolder
from manyhands.core.stops import held_back
from manyhands.core.version import __version__
from manyhands.core.world import ProcessInfo

Say = Callable[[str], None]
# How a process came to be: one head watches over all, or each machine has its own and they met.
OUR_HEAD, MET = "manyhands", "met"


class GroupMember:
    """A process of a run or task, with its resources so far; other threads read it too.

    Args:
        process_info: the rank and rendezvous of this process.
        folder: the run folder; without a launcher, ranks above 0 use rank 0's folder after the rendezvous.
        phase: the phase for a failure record.
    """

    def __init__(self, process_info: ProcessInfo, folder: RunFolder, phase: str) -> None:
        self.process_info, self.folder, self._phase = process_info, folder, phase
        self.trainer: Any = None
        self.group: Any = None
        self._failed = False

    def join(self, job: Job, options: str, say: Say, *, ends_with_rank_0: bool = True) -> Any:
        """Joins the process group.

        Args:
            job: the job.
            options: the options that must be equal on all processes.
            say: prints a message to the user.
            ends_with_rank_0: False if rank 0 may finish before this process.
        """
        with held_back():
            from manyhands.parallel.group.join import join

        process_info = self.process_info
        self.group = group = join(process_info, options, job.cluster.peer_timeout_s, say)
        if process_info.started_by != OUR_HEAD:
            # A closed connection ends gloo's collectives; and a group that stood before is not ours to abort.
            ends_itself = group.world.device in {"cpu", "mps"} or group.stands is not None
            group.listen(
                process_info.attempt,
                None if ends_itself else lambda failure: self.leave(failure) if failure or ends_with_rank_0 else None,
            )
        return group

    def leave(self, failure: Any) -> None:
        """Writes the record and ends this process from a thread, because the main thread may hang on an accelerator."""
        record = leave_record(describe_peer(self.process_info.rank, failure, self.trainer), self.folder)
        terminal.say(str(as_error(record)))
        if self.group:
            self.group.abort()

    def roll_called(self) -> AbstractContextManager[None]:
        """Starts the liveness check that names missing processes, if no agent does that."""
        group, trainer = self.group, self.trainer
        if group.store is None or self.process_info.started_by in {OUR_HEAD, MET}:
            return nullcontext()
        from manyhands.worker.roll_call import LivenessCheck

        def heartbeat() -> Any:
            return trainer.heartbeats.heartbeat(trainer.phase)

        def say(words: str) -> None:
            if self.process_info.rank:
                terminal.say(words)
            trainer.journal.line(words)
            trainer.journal.event("warning", words, trainer.progress.step)

        return LivenessCheck(group.store, self.process_info, group.present, heartbeat, say).answering()

    def hung(self) -> str:
        """Returns why this process can't save any more; empty if it may."""
        return self.trainer.heartbeats.hung() if self.trainer else ""

    def last_words(self, why: str) -> None:
        """Prints which step was saved, before the process is ended at once."""
        if self.process_info.rank == 0 or self.process_info.started_by == "--init":
            terminal.say(str(unsaved(self.folder.path, saved_step(self.folder), why)))

    def record_of(self, error: BaseException) -> Failure:
        """Writes and returns the record of a failure, with the first cause if it is known."""
        from manyhands.train.failing import describe_failure

        self._failed = True
        step = self.trainer.progress.step if self.trainer else None
        phase = self.trainer.phase if self.trainer else self._phase if self.group else "join"
        record = describe_failure(_explained(error, self.trainer), rank=self.process_info.rank, step=step, phase=phase)
        record = leave_record(record, self.folder)
        if self.group and self.group.cause:
            record = first_of_all(self.group, record)
            _write_record(record, self.folder)
        return record

    def give_back(self) -> None:
        """Releases the resources and leaves the group."""
        if self.trainer:
            self.trainer.release()
        if self.group:
            self.group.leave(failed=self._failed)


def leave_record(record: Failure, folder: RunFolder) -> Failure:
    """Writes why a process ended to where its head looks for it, and the whole traceback into its log.

    This comes before anything that may wait for other processes, who may be gone. Nothing is made anew: the folder may
    not be known yet, or be gone already.
    """
    log = folder.ranks / f"{record.rank}.log"
    if record.traceback and folder.failures.is_dir():
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(record.traceback)
            if record.exit_code != EXIT_USAGE and not record.hints:
                record = record.model_copy(update={"hints": [f"see the full traceback in {log}"]})
    _write_record(record, folder)
    return record


def _write_record(record: Failure, folder: RunFolder) -> None:
    """For the agent that started this process, if one did, and into the run folder, whose disk may be full."""
    places = [Path(os.environ[FAILURE_FILE])] if FAILURE_FILE in os.environ else []
    places += [folder.failures / f"{record.rank}.json"] if folder.failures.is_dir() else []
    for place in places:
        with suppress(OSError):
            write_json(place, record)


def _explained(error: BaseException, trainer: Any) -> BaseException:
    """An error that can be told better, told better."""
    from manyhands.train.failing import explain_early_memory, explain_memory, is_out_of_memory

    if is_out_of_memory(error):
        explained = explain_memory(error, trainer) if trainer else explain_early_memory(error)
        explained.__cause__ = error
        return explained
    return error


def share_folder(world: Any, folder: RunFolder) -> RunFolder:
    """Returns the run folder with rank 0's path, and creates it on every machine."""
    from manyhands.parallel.group.plain import broadcast_plain

    folder = RunFolder(Path(broadcast_plain(str(folder.path.absolute()), world)))
    folder.failures.mkdir(parents=True, exist_ok=True)
    return folder


def publish_invalid_rank(job: Job, process_info: ProcessInfo, what: str) -> None:
    """Reports to all waiting processes that this process has an invalid rank and ends."""
    # Its C++ parts would log what is no news here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from manyhands.parallel.group.rendezvous import report_invalid_rank, report_to_waiting_ranks

    report_to_waiting_ranks(process_info, lambda names: report_invalid_rank(names, shared_options(job), what))


def first_of_all(group: Any, record: Failure) -> Failure:
    """Publishes the first cause to the other processes, or reads it from them if this error is a consequence."""
    if not record.consequence:
        from manyhands.parallel.group.rendezvous import PeerFailure

        group.cause.publish(PeerFailure.of(record.rank, record.host, record.what))
        return record
    failure = group.cause.learn()
    if not failure:
        # Nothing better is known than what the library itself has said.
        what = f"another process ended or is unreachable: {record.what}"
        hints = ["see the last messages of the other processes", *record.hints]
        return record.model_copy(update={"what": what, "hints": hints, "excerpt": ""})
    return record.model_copy(update=heard(failure))


def heard(failure: Any) -> dict[str, Any]:
    """Returns the fields of a failure record if another process failed first: its message without its hints."""
    what = f"rank {failure.rank} on {failure.host} failed first: {failure.what}"
    return {"what": what, "hints": [f"see the terminal or log of rank {failure.rank}"], "excerpt": ""}


def describe_peer(rank: int, failure: Any, trainer: Any) -> Failure:
    """Returns the record of a process that ends because of another one, whose record is `failure` (None if unknown)."""
    record = Failure(
        time=time.time(),
        rank=rank,
        host=platform.node(),
        pid=os.getpid(),
        step=trainer.progress.step if trainer else None,
        phase=trainer.phase if trainer else "build",
        error="PeerGone",
        what="rank 0's store is unreachable, so the run can't continue",
        hints=["see the last messages of rank 0"],
        consequence=True,
    )
    return record.model_copy(update=heard(failure)) if failure else record


# Of the cluster's options, those that all processes must agree in. Where they meet is not one of them: rank 0 may call
# it 0.0.0.0, a name, or another of its addresses; and who meets compares the world's size.
SHARED = {"backend"}


def shared_options(job: Job) -> str:
    """Returns the version and the options that must be equal on all processes, such as "train.epochs=3 …".

    Numbers are written in full, other values as digests, because they may be private.
    """
    own = {
        "cluster": set(ClusterOptions.model_fields) - SHARED,
        "data": {"workers", "machine_workers"},
        "run": {"out", "report"},
        "checkpoint": {"resume"},
    }
    options = {"manyhands": __version__, **flatten(job.model_dump(mode="json", exclude=own))}
    return " ".join(f"{key}={_word(value)}" for key, value in options.items())


def _word(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if isinstance(value, int | float) else hashlib.sha256(text.encode()).hexdigest()[:12]
