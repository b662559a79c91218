"""Imports what workers need before they are forked, so that they start at once and share its memory."""

import importlib
import sys

# The imports are the purpose.
import manyhands.cluster.doctor.accelerators
import manyhands.train.build
import manyhands.train.exceptions
import manyhands.train.loop
import manyhands.worker.precision  # noqa: F401
from manyhands.cluster.agents.orders import Orders
from manyhands.cluster.doctor.facts import torchvision_misfit
from manyhands.config.job import Job
from manyhands.core.errors import RunError
from manyhands.data.known import is_published
from manyhands.models.build import is_custom
from manyhands.parallel.options import USUAL_MODE


def preload(orders: Orders | None = None) -> None:
    """Imports torchvision, and with it torch's compiler, where workers are going to use either, or nobody knows yet.

    Both take as long as torch itself. A worker that needs one after all imports it then.

    Raises:
        RunError: torchvision can't be imported.
    """
    importlib.import_module(f"manyhands.parallel.modes.{USUAL_MODE}")
    if orders is None or not _does_without(orders):
        try:
            importlib.import_module("torchvision")
        except Exception as error:
            what = torchvision_misfit() or f"torchvision can't be imported: {type(error).__name__}: {error}"
            raise RunError(what, sys.executable, ("run manyhands doctor to see what to install",)) from error


def _does_without(orders: Orders) -> bool:
    """True where network, data and optimizer are ours, and gradients go through memory: DDP asks the compiler."""
    job = Job.model_validate(orders.argument["job"])
    own = is_custom(job.model.name) and is_published(job.data.name) and job.train.built_in and not job.train.compile
    through_memory = (
        job.parallel.mode == USUAL_MODE and job.parallel.shared_memory and len(orders.rendezvous.sizes) == 1
    )
    return orders.argument["task"] == "train" and own and through_memory
