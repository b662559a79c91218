"""A process's membership in a process group: rendezvous, failures of peers, and the process's own failure record."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from manyhands import __version__
from manyhands.checkpoint.folders import saved_step, unsaved_error
from manyhands.cluster.failures import error_of_record
from manyhands.config.job import ClusterOptions, Job
from manyhands.core import terminal
from manyhands.core.records import Failure
from manyhands.core.run_folder import RunFolder
from manyhands.core.stops import stop_signals_delayed
from manyhands.core.world import ProcessInfo

Say = Callable[[str], None]
OUR_HEAD, MET = "manyhands", "met"  # values of `ProcessInfo.started_by`: one launcher for all machines, or one for each


class GroupMember:
    """This process as a member of a process group; also read by other threads. `phase`: for failure records."""

    def __init__(self, process_info: ProcessInfo, folder: RunFolder, phase: str) -> None:
        self.process_info, self.folder, self._phase = process_info, folder, phase
        self.trainer: Any = None
        self.group: Any = None
        self._failed = False

    def join(self, job: Job, options: str, say: Say, *, ends_with_rank_0: bool = True) -> Any:
        """Joins and returns the process group. `options`: a text that must be equal on all processes.

        `ends_with_rank_0`: False if rank 0 may finish before this process.
        """
        with stop_signals_delayed():
            from manyhands.parallel.group.join import join

        process_info = self.process_info
        self.group = group = join(process_info, options, job.cluster.peer_timeout_s, say)
        if process_info.started_by != OUR_HEAD:
            # A closed connection ends gloo's collectives; a group that existed before isn't aborted.
            ends_itself = group.world.device in {"cpu", "mps"} or group.earlier_groups is not None
            group.listen(
                process_info.attempt,
                None if ends_itself else lambda failure: self.exit(failure) if failure or ends_with_rank_0 else None,
            )
        return group

    def exit(self, failure: Any) -> None:
        """Records a peer's failure and ends this process, from a thread, because the main thread may hang."""
        from manyhands.worker.failure import describe_peer_failure, save_record

        record = save_record(describe_peer_failure(failure, **self._step_and_phase()), self.folder)
        terminal.say(str(error_of_record(record)))
        if self.group:
            self.group.abort()

    def liveness_checked(self) -> AbstractContextManager[None]:
        """Returns a context in which the liveness check runs, unless an agent runs it."""
        group, trainer = self.group, self.trainer
        if group.store is None or self.process_info.started_by in {OUR_HEAD, MET}:
            return nullcontext()
        from manyhands.worker.roll_call import LivenessCheck

        def say(words: str) -> None:
            if self.process_info.rank:
                terminal.say(words)
            trainer.journal.line(words)
            trainer.journal.event("warning", words, trainer.progress.step)

        beat = trainer.heartbeats.heartbeat
        return LivenessCheck(group.store, self.process_info, group.present, beat, say).run_in_background()

    def hang_reason(self) -> str:
        """Returns a sentence if this process hangs, so that it can't save a checkpoint, else ""."""
        return self.trainer.heartbeats.hang_reason() if self.trainer else ""

    def print_unsaved(self, why: str) -> None:
        """Prints the last saved step, and the reason `why` no later step is saved, before this process is killed."""
        if self.process_info.rank == 0 or self.process_info.started_by == "--init":
            terminal.say(str(unsaved_error(self.folder.path, saved_step(self.folder), why)))

    def record_failure(self, error: BaseException) -> Failure:
        """Writes and returns this process's failure record. If another process failed first, reports that failure."""
        from manyhands.worker import failure

        self._failed, position = True, self._step_and_phase()
        if failure.is_out_of_memory(error):
            cause, error = error, failure.explain_out_of_memory(error, self.trainer)
            error.__cause__ = cause
        record = failure.save_record(failure.describe_failure(error, **position), self.folder)
        if self.group and self.group.cause:
            record = failure.publish_or_adopt_first_cause(self.group, record)
            failure.write_record(record, self.folder)
        return record

    def _step_and_phase(self) -> dict[str, Any]:
        trainer = self.trainer
        phase = trainer.heartbeats.phase if trainer else self._phase if self.group else "join"
        return {"rank": self.process_info.rank, "step": trainer.progress.step if trainer else None, "phase": phase}

    def release_resources(self) -> None:
        if self.trainer:
            self.trainer.resources.close()
        if self.group:
            self.group.leave(failed=self._failed)


def share_folder(world: Any, folder: RunFolder) -> RunFolder:
    """Creates and returns the run folder, at rank 0's path on every machine. A collective."""
    from manyhands.parallel.group.plain import broadcast_plain

    folder = RunFolder(Path(broadcast_plain(str(folder.path.absolute()), world)))
    folder.failures.mkdir(parents=True, exist_ok=True)
    return folder


def publish_invalid_rank(job: Job, process_info: ProcessInfo, what: str) -> None:
    """Reports that this process has an invalid rank to all processes that wait in the rendezvous. `what`: why."""
    # Silences torch's C++ log.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from manyhands.parallel.group.rendezvous import report_invalid_rank, report_to_waiting_ranks

    report_to_waiting_ranks(process_info, lambda store: report_invalid_rank(store, shared_options(job), what))


def shared_options(job: Job) -> str:
    """Returns a text of the version and the options that must be equal on all processes, such as "train.epochs=3 …".

    Numbers are written as text. Other values are written as digests, because values may be private.
    """

    def value_text(value: Any) -> str:
        text = json.dumps(value, sort_keys=True)
        return text if isinstance(value, int | float) else hashlib.sha256(text.encode()).hexdigest()[:12]

    own = {
        # Each rank may specify the rendezvous in another way, and the rendezvous compares the world size.
        "cluster": set(ClusterOptions.model_fields) - {"backend"},
        "data": {"workers", "machine_workers"},
        "run": {"out", "report"},
        "checkpoint": {"resume"},
    }
    sections = job.model_dump(mode="json", exclude=own).items()
    options = {f"{section}.{key}": value for section, values in sections for key, value in values.items()}
    return " ".join(f"{key}={value_text(value)}" for key, value in {"manyhands": __version__, **options}.items())
