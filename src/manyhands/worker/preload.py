"""Imports the modules of workers before they are forked, so that they start at once and share memory."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Generator

from manyhands.cluster.agents.protocol import Orders
from manyhands.config.job import Job
from manyhands.core.errors import RunError
from manyhands.data.known import is_published
from manyhands.data.open import open_ahead
from manyhands.parallel.options import USUAL_MODE


@contextlib.contextmanager
def opened_ahead(orders: Orders) -> Generator[None]:
    """Unpacks the workers' published data set in a thread, which ends with the context."""
    job = Job.model_validate(orders.argument["job"])
    named = orders.argument["task"] == "train" and not orders.argument.get("objects")
    if not named or not is_published(job.data.name) or job.data.held_out:
        yield
        return
    thread = threading.Thread(target=open_ahead, args=(job.data,), name="opens the data", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def import_training() -> None:
    """Imports the modules that every training worker needs."""
    needed = ("train.build", "train.loop", "worker.run_metadata", f"parallel.modes.{USUAL_MODE}")
    for name in needed:
        importlib.import_module(f"manyhands.{name}")


def preload(orders: Orders | None = None) -> None:
    """Imports the training modules; the precision measurement and torchvision only if workers may need them.

    An import of torchvision, and with it torch's compiler, takes as long as an import of torch. Raises RunError if
    torchvision can't be imported.
    """
    import_training()
    job = Job.model_validate(orders.argument["job"]) if orders else None
    if job is None or job.train.measured_precision:
        importlib.import_module("manyhands.train.precision")
    if orders is None or job is None or not _needs_no_torchvision(orders, job):
        try:
            importlib.import_module("torchvision")
        except Exception as error:
            from manyhands.cluster.doctor.facts import torchvision_misfit

            what = torchvision_misfit() or f"torchvision can't be imported: {type(error).__name__}: {error}"
            raise RunError(what, sys.executable, ("run manyhands doctor to see what to install",)) from error


def _needs_no_torchvision(orders: Orders, job: Job) -> bool:
    """Returns True if network, data and optimizer are built in, and gradients are averaged in shared memory."""
    from manyhands.models.build import is_custom

    own = is_custom(job.model.name) and is_published(job.data.name) and job.train.built_in and not job.train.compile
    through_memory = job.parallel.mode == USUAL_MODE and job.parallel.shared_memory
    return orders.argument["task"] == "train" and own and through_memory and len(orders.rendezvous.sizes) == 1
