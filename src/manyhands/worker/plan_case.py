"""What is known of a job before its work is planned or priced: its data's figures, its network, and where it runs."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from manyhands.config.job import Job
from manyhands.core.devices import device_kind, require_device
from manyhands.core.run_folder import NOWHERE
from manyhands.core.world import World
from manyhands.data.order import batch_noted
from manyhands.parallel.graph import Graph
from manyhands.parallel.norm import group_batch_norms
from manyhands.parallel.tracing import describe_network
from manyhands.planner.device_models import DeviceModel, device_model
from manyhands.sync.link_speeds import LinkSpeed, through_ssh
from manyhands.train.data_setup import class_names, open_splits, pixels_for
from manyhands.train.objects import Objects
from manyhands.worker.plan_sync import link_between
from manyhands.worker.plan_trials import make_network, picture
from manyhands.worker.precision import plain_precision, resolve_precision


@dataclass(frozen=True)
class JobCase:
    """A job whose work is to be planned."""

    job: Job  # as the user wrote it; with a precision and a layout once it is `resolved`
    network: dict[str, Any]  # channels, size, classes, batch and samples, as plain data
    device: str  # that computes; a model's name where it isn't here
    direct: LinkSpeed | None  # the link between machines of one process each; None where all is on one machine
    modelled: DeviceModel | None  # the device that isn't here
    # operations and bytes a second of a device that isn't here; None of one that is
    rates: tuple[float, float] | None = None
    said: tuple[str, ...] = ()  # sentences on what was settled

    @property
    def between(self) -> LinkSpeed | None:
        """The link that tensors take: through ssh where the job says so."""
        return through_ssh(self.direct) if self.direct and self.job.cluster.through_ssh else self.direct

    @property
    def here(self) -> str:
        """Where its network is made on this machine."""
        return "cpu" if self.modelled else self.device

    def resolved(self, processes: int, *, measure: bool) -> "JobCase":
        """The job with a precision and a layout, measured where that is wished for and the device is here."""
        smaller = batch_noted(self.job.train.batch, self.network["samples"])
        if self.modelled:
            found = plain_precision(self.job)
            precision = found.job.train.precision
            rates, model = self.modelled.rates(precision), self.modelled.said(precision)
        else:
            world = World(device=device_kind(self.job.cluster.device, processes))
            found = resolve_precision(self.job, NOWHERE, world, self.job.parallel.mode, Objects(), measure=measure)
            rates, model = None, ""
        return replace(self, job=found.job, rates=rates, said=(*filter(None, (*found.said, model, smaller)),))

    def described(self) -> tuple[nn.Module, Graph]:
        """The network in training and its ops."""
        model = make_network(self.job, self.network, self.here)
        group_batch_norms(model)
        graph = describe_network(model, picture(self.job, self.network, self.here))
        if self.job.train.loss != "cross-entropy":
            graph.keep_classes()
        return model, graph


def case_to_plan(job: Job, processes: int, link: str, model: str) -> JobCase:
    """Reads a job's data and the speed of its links.

    Args:
        job: what is to be trained.
        processes: how many at most.
        link: such as 1gbit, between machines of one process each; empty for the job's own, or one machine.
        model: of devices that aren't here; empty for this machine's.

    Raises:
        UserError: the data isn't there, or doesn't fit; a speed or a model can't be read.
    """
    modelled = device_model(model) if model else None
    device = modelled.name if modelled else device_kind(job.cluster.device, processes)
    if not modelled:
        require_device(device, "for other devices, estimate with --device-model h100 (a100, 910b, rtx4090 …)")
    return JobCase(job, network_of(job), device, link_between(job, link), modelled)


def network_of(job: Job) -> dict[str, Any]:
    """What the data says of a job's network: channels, size, classes, samples in an update (batch) and in an epoch.

    Raises:
        UserError: the data isn't there, or doesn't fit.
    """
    objects = Objects()
    splits = open_splits(job, World(), objects)
    pixels = pixels_for(job, splits, objects)
    return {
        "channels": pixels.channels,
        "size": pixels.size,
        "classes": len(class_names(job, splits)),
        "batch": min(job.train.batch, len(splits.train)),
        "samples": len(splits.train),
    }
