"""Functions of the Python interface that run in the user's process: sessions and trained networks."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from manyhands.checkpoint.folders import find_checkpoint
from manyhands.checkpoint.read import load_checkpoint
from manyhands.checkpoint.trained import find_record, record_trained_on
from manyhands.cluster.failures import error_of_record
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_SAVED
from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.stops import StopSignal, stop_signal
from manyhands.core.terminal import say
from manyhands.core.world import ProcessInfo, World
from manyhands.data.samples import to_pil_image
from manyhands.parallel.group.join import existing_process_info
from manyhands.train.data_setup import digest_data, digest_trainable, digest_weights, open_splits
from manyhands.train.objects import Objects
from manyhands.train.session import Session
from manyhands.train.state import load_snapshot
from manyhands.train.trained import guess, open_trained
from manyhands.worker.member import GroupMember, share_folder, shared_options
from manyhands.worker.run_metadata import write_metadata

__all__ = ["digest_data_objects", "digest_trainable", "digest_weights", "existing_process_info", "to_pil_image"]
__all__ += ["guess", "load_weights", "open_session", "open_trained"]

_SUCCESS_CODES = {None, 0, EXIT_SAVED}  # exit codes of a user's loop that aren't failures


@contextlib.contextmanager
def open_session(
    job: Job,
    process_info: ProcessInfo,
    program: str,
    folder: RunFolder | None,
    scheduled: bool,
    metrics: Mapping[str, Any],
) -> Iterator[Session]:
    """Opens a session with the processes that run the same `program`, with rank 0's run folder or without a folder.

    `scheduled`: True if the job sets the learning rate. `metrics`: the user's metric objects by name.
    """
    mine, here = GroupMember(process_info, folder or NOWHERE, "session"), None
    options = f"{shared_options(job)} program={program} folder={folder is not None}"
    try:
        world = mine.join(job, options, say, ends_with_rank_0=False).world
        with stop_signal() if folder else contextlib.nullcontext(StopSignal()) as stop:
            shared = share_folder(world, folder) if folder else None
            mine.folder = shared or NOWHERE
            own = {"scheduled": scheduled, "metrics": metrics}
            here = Session(world, job, shared, stop=stop, write_metadata=write_metadata, **own)
            yield here
            here.finish()
    except BaseException as error:
        if isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in _SUCCESS_CODES):
            raise
        record = mine.record_failure(error)
        if record.consequence:
            raise error_of_record(record) from None
        raise
    finally:
        if here:
            here.close()
        mine.release_resources()


def load_weights(model: nn.Module, run: Path) -> None:
    """Loads a run's last checkpoint into a network. Stores the run's preprocessing and classes for this network."""
    path = find_checkpoint(run, "last")
    snapshot = load_checkpoint(path)
    load_snapshot(snapshot, model, str(path))
    if record := find_record(path, snapshot.state):
        record_trained_on(model, record.pictures, record.classes)


def digest_data_objects(job: Job, objects: Objects) -> dict[str, str]:
    """Returns a dict of digests of the data if the data sets were passed as Python objects, else {}."""
    return digest_data(open_splits(job, World(), objects)) if objects.train_set is not None else {}
