"""The inputs of a plan for a job: sizes of the data, network, devices, and times on this machine."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from manyhands.config.job import Job
from manyhands.core.devices import device_kind, require_device
from manyhands.core.machine import cores
from manyhands.core.run_folder import NOWHERE
from manyhands.core.world import World
from manyhands.data.order import batch_noted
from manyhands.parallel.split.graph import Graph
from manyhands.planner.device_models import DeviceModel, device_model
from manyhands.planner.find import PlanCandidate, SearchResult, fewer_counts, options_of
from manyhands.planner.links import work_of_sums
from manyhands.planner.timing import Timing
from manyhands.planner.trial import share_timing
from manyhands.sync.link_speeds import LinkSpeed, through_ssh
from manyhands.sync.measure import pass_seconds
from manyhands.train.data_setup import class_names, open_splits, pixels_for
from manyhands.train.objects import Objects
from manyhands.worker.plan_advice import link_between
from manyhands.worker.plan_trials import case_of, graph_of, make_network, picture
from manyhands.worker.precision import plain_precision, resolve_precision

# Seconds for timing the share of one number of processes: of the plan's, and of fewer.
_SHARE_S, _FEWER_S = 10.0, 4.0


@dataclass(frozen=True)
class JobCase:
    """A job to plan."""

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
        """The link for tensors: through ssh if the job uses ssh tunnels."""
        return through_ssh(self.direct) if self.direct and self.job.cluster.through_ssh else self.direct

    @property
    def here(self) -> str:
        """The device of the network on this machine."""
        return "cpu" if self.modelled else self.device

    def resolved(self, processes: int, *, measure: bool) -> "JobCase":
        """Returns the job with precision and layout, measured if requested and if the device is on this machine."""
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
        """Returns the network in training mode and its ops."""
        model = make_network(self.job, self.network, self.here)
        sample = picture(self.job, self.network, self.here)
        return model, graph_of(model, sample, cross_entropy=self.job.train.loss == "cross-entropy")


def case_to_plan(job: Job, processes: int, link: str, model: str) -> JobCase:
    """Reads a job's data and the speed of its links.

    Args:
        job: the job.
        processes: the largest number of processes.
        link: the link between machines of one process each, such as 1gbit; empty: the job's, or one machine.
        model: the device model to estimate for; empty: this machine's device.

    Raises:
        UserError: the data is missing or doesn't fit, or a link speed or device model is invalid.
    """
    modelled = device_model(model) if model else None
    device = modelled.name if modelled else device_kind(job.cluster.device, processes)
    if not modelled:
        require_device(device, "for other devices, estimate with --device-model h100 (a100, 910b, rtx4090 …)")
    return JobCase(job, network_of(job), device, link_between(job, link), modelled)


def network_of(job: Job, world: World | None = None, objects: Objects | None = None) -> dict[str, Any]:
    """Returns sizes from the data: channels, size, classes, and samples in an update (batch) and in an epoch.

    Raises:
        UserError: the data is missing or doesn't fit.
    """
    objects = objects or Objects()
    splits = open_splits(job, world or World(), objects)
    pixels = pixels_for(job, splits, objects)
    return {
        "channels": pixels.channels,
        "size": pixels.size,
        "classes": len(class_names(job, splits)),
        "batch": min(job.train.batch, len(splits.train)),
        "samples": len(splits.train),
    }


@dataclass
class Costs:
    """Times on this machine, each measured once.

    Args:
        job: the job on all its processes.
        network: channels, size, classes and batch.
        device: the device of the ops.
        between: the link if each process is on a separate machine; None if all share this machine.
        measured: False to measure nothing.
    """

    job: Job
    network: dict[str, Any]
    device: str
    between: LinkSpeed | None
    measured: bool

    def share(self, processes: int, budget_s: float = _SHARE_S) -> Timing | None:
        """Returns the time of one process's share of an update, divided among `processes`."""
        if not self.measured:
            return None

        together = 1 if self.between else processes
        threads = self.job.cluster.threads or (0 if self.between else max(1, torch.get_num_threads() // together))
        case = case_of(self.job, self.network, self.device)
        return share_timing(case, processes, threads, self.job.train.micro_batch, budget_s)

    def fewer(self, found: SearchResult) -> tuple[PlanCandidate, ...]:
        """Returns data parallel on fewer processes; without measurements, only on separate machines."""
        # Processes of one machine share its cores, of which estimates know nothing.
        apart = self.between is not None or self.device != "cpu"
        if found.fewer is None or found.request.pins or not (apart or self.measured):
            return ()
        counts = fewer_counts(found.request.world_size)
        timed = {count: self.share(count, _FEWER_S) for count in counts}
        return tuple(options_of(counts, found.fewer, {count: one for count, one in timed.items() if one}))

    def worked(self, link: LinkSpeed) -> LinkSpeed:
        """Returns the link with the time in which messages occupy the cores of a process."""
        if self.device != "cpu" or not self.measured:
            return link
        if self._work is None:
            self._work = work_of_sums(cores() / (1 if self.between else self.job.cluster.processes))
        return link.with_work_of(self._work)

    _work: LinkSpeed | None = None

    def pass_s(self, model: nn.Module) -> float:
        """Returns the seconds to add two vectors of all parameters; 0 without measurements."""
        count = sum(one.numel() for one in model.parameters() if one.requires_grad)
        return pass_seconds(count, self.device) if self.measured else 0.0
