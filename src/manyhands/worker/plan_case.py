"""What a plan for a job is made from: its data's figures, its network, where it runs, and times on this machine."""

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
from manyhands.parallel.graph import Graph
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
        sample = picture(self.job, self.network, self.here)
        return model, graph_of(model, sample, cross_entropy=self.job.train.loss == "cross-entropy")


def case_to_plan(job: Job, processes: int, link: str, model: str) -> JobCase:
    """Reads a job's data and the speed of its links.

    Args:
        job: the job.
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


def network_of(job: Job, world: World | None = None, objects: Objects | None = None) -> dict[str, Any]:
    """What the data says of a job's network: channels, size, classes, samples in an update (batch) and in an epoch.

    Raises:
        UserError: the data isn't there, or doesn't fit.
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
    """Times on this machine, each taken once.

    Args:
        job: on all its processes.
        network: channels, size, classes and batch.
        device: the device of the ops.
        between: the link where each process has a machine like this one; None where all share this one.
        measured: False to time nothing.
    """

    job: Job
    network: dict[str, Any]
    device: str
    between: LinkSpeed | None
    measured: bool

    def share(self, processes: int, budget_s: float = _SHARE_S) -> Timing | None:
        """One process's update where so many share it."""
        if not self.measured:
            return None

        together = 1 if self.between else processes
        threads = self.job.cluster.threads or (0 if self.between else max(1, torch.get_num_threads() // together))
        case = case_of(self.job, self.network, self.device)
        return share_timing(case, processes, threads, self.job.train.micro_batch, budget_s)

    def fewer(self, found: SearchResult) -> tuple[PlanCandidate, ...]:
        """Data parallel on fewer processes; where nothing is timed, on machines of their own alone."""
        # Processes of one machine share its cores, of which estimates know nothing.
        apart = self.between is not None or self.device != "cpu"
        if found.fewer is None or found.request.pins or not (apart or self.measured):
            return ()
        counts = fewer_counts(found.request.world_size)
        timed = {count: self.share(count, _FEWER_S) for count in counts}
        return tuple(options_of(counts, found.fewer, {count: one for count, one in timed.items() if one}))

    def worked(self, link: LinkSpeed) -> LinkSpeed:
        """The link, with what its messages keep a process's cores from."""
        if self.device != "cpu" or not self.measured:
            return link
        if self._work is None:
            self._work = work_of_sums(cores() / (1 if self.between else self.job.cluster.processes))
        return link.with_work_of(self._work)

    _work: LinkSpeed | None = None

    def pass_s(self, model: nn.Module) -> float:
        """Seconds of a sum of two vectors of all parameters; 0 where nothing is timed."""
        count = sum(one.numel() for one in model.parameters() if one.requires_grad)
        return pass_seconds(count, self.device) if self.measured else 0.0
