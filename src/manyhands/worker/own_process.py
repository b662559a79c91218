"""What the Python interface computes in the user's own process: a session, a trained network."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from manyhands.checkpoint.find import resolve
from manyhands.checkpoint.load import load
from manyhands.config.job import Job
from manyhands.core.folder import RunFolder
from manyhands.core.shown import say
from manyhands.core.world import Membership
from manyhands.data.on_demand import as_picture
from manyhands.parallel.group import join
from manyhands.parallel.plain import gather_plain
from manyhands.parallel.standing import standing_membership
from manyhands.train.predict import guess
from manyhands.train.session import Session
from manyhands.train.stopping import StopSignal, listening
from manyhands.train.trained import open_trained
from manyhands.train.trainer import Trainer
from manyhands.worker.account import give_account, own_environment
from manyhands.worker.entry import share_folder
from manyhands.worker.shared_options import shared_options

__all__ = ["as_picture", "guess", "guess_files", "load_weights", "open_trained", "opened", "standing_membership"]


@contextlib.contextmanager
def opened(
    job: Job,
    membership: Membership,
    program: str,
    folder: RunFolder | None,
    scheduled: bool,
    metrics: Mapping[str, Any],
) -> Iterator[Session]:
    """A session at a place among the processes.

    Args:
        job: the settings.
        membership: the place.
        program: the same on all of them.
        folder: the run folder, on ranks above 0 rank 0's once they have met; None for none.
        scheduled: the job moves the learning rate.
        metrics: figures of the user's own that are objects.
    """
    options = f"{shared_options(job)} program={program} folder={folder is not None}"
    group = join(membership, options, job.cluster.collective_timeout_s, say)
    try:
        with listening() if folder else contextlib.nullcontext(StopSignal()) as stop:
            shared = share_folder(group.world, folder) if folder else None
            here = Session(
                group.world,
                job,
                shared,
                scheduled=scheduled,
                metrics=metrics,
                stop=stop,
                give_account=_give_account,
            )
            try:
                yield here
                here.finish()
            finally:
                here.close()
    finally:
        group.leave()


def _give_account(trainer: Trainer) -> None:
    ranks = gather_plain(own_environment(trainer.world), trainer.world)
    if trainer.world.is_main:
        give_account(trainer, ranks, {})


def load_weights(model: nn.Module, run: Path) -> None:
    """Gives a network the last weights of a run."""
    model.load_state_dict(load(resolve(run, "last")).model)


def guess_files(path: Path, files: Sequence[Path], model: str | None, device: str) -> Iterator[list[tuple[str, float]]]:
    """The most likely classes of each picture, by the network of a checkpoint."""
    return guess(open_trained(path, model=model, device=device), files)
