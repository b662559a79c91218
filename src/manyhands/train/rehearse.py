"""A first pass over two samples before anything counts: mistakes come out at once, and DDP settles its buckets."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from manyhands.config.job import Job
from manyhands.core.errors import RunError, UserError
from manyhands.core.seeds import derive
from manyhands.core.world import World
from manyhands.data.loader import Batch, Loader
from manyhands.data.order import Share
from manyhands.parallel.norm import NormGroups
from manyhands.parallel.rows import settle_rows, watching
from manyhands.train.criterion import Criterion
from manyhands.train.draws import drawing
from manyhands.train.feed import Pass, Update
from manyhands.train.step import AUTOCAST, Updater

# Samples of a share that are timed, and how often; the first time is slower.
MOST_TIMED, TIMED = 64, 3


@dataclass(frozen=True)
class Trial:
    """What is tried.

    Attributes:
        model: the network, before its parallel mode.
        groups: of its BatchNorm layers.
        loader: of training samples.
        criterion: the loss.
        job: that it is for.
    """

    model: nn.Module
    groups: NormGroups
    loader: Loader
    criterion: Criterion
    job: Job


@dataclass(frozen=True)
class Rehearsed:
    """What was learnt of a network.

    Attributes:
        unused: names of trainable parameters that got no gradient.
        draws: True where its training pass or its loss draws random numbers.
        outputs: how many it has; at least as many as there are classes. 0: it wasn't tried.
    """

    unused: list[str]
    draws: bool
    outputs: int = 0


def rehearse(trial: Trial, classes: int, count: int) -> Rehearsed:
    """Runs the network once on `count` samples on this process alone and leaves it as it was.

    What it draws follows from the job's seed, so all processes find the same.

    Raises:
        UserError: the network's output doesn't fit the data.
    """
    model, batch = trial.model, _samples(trial.loader, count)
    trial.groups.begin_pass((), (), count, count)
    kind = AUTOCAST.get(trial.job.train.precision)
    seed, device = derive(trial.job.train.seed, "rehearse"), batch.labels.device.type
    with _unchanged(model, trial.groups), drawing(seed, device) as drawn:
        with torch.autocast(device, dtype=kind, enabled=kind is not None):
            with watching(trial.groups.layers) as seen:
                output = model(batch.images)
            loss, logits = trial.criterion(output, batch.labels)
        if logits.ndim != 2 or logits.shape[0] != count or logits.shape[1] < classes:
            raise UserError(
                f"the network's output is {list(logits.shape)} for {count} pictures of {classes} classes",
                "model.name",
                (f"it should be [{count}, {classes}]", f"--set model.num_classes={logits.shape[-1]} if that is meant"),
            )
        loss.backward()
        unused = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        found = Rehearsed(unused, drawn(), logits.shape[1])
        settle_rows(model, seen, batch.images)
        return found


def time_step(trial: Trial, share: int, world: World) -> tuple[float, float]:
    """Seconds of an update of `share` samples without any agreement, on the slowest process; a collective.

    The network is left as it was. A large share is timed on a part of it.

    Returns:
        Seconds of the whole update, and of its backward pass.
    """
    # Of a pass of micro_batch it is known that it fits into memory.
    count, model = min(share, MOST_TIMED, trial.job.train.micro_batch or share), trial.model
    batch = _samples(trial.loader, count)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Copies are moved: even a step of no length would spoil parameters where a gradient overflows.
    copies = [parameter.detach().clone() for parameter in trained]
    optimizer = torch.optim.SGD(copies, lr=0.0, momentum=0.9)
    trial.groups.begin_pass((), (), count, count)
    kind = AUTOCAST.get(trial.job.train.precision)
    taken = torch.zeros(TIMED, 3, dtype=torch.float64)
    with _unchanged(model, trial.groups), torch.random.fork_rng(devices=[]):
        for number in range(TIMED):
            for parameter in trained:
                parameter.grad = None
            marks = [_now(world)]
            with torch.autocast(batch.labels.device.type, dtype=kind, enabled=kind is not None):
                loss, _ = trial.criterion(model(batch.images), batch.labels)
            marks.append(_now(world))
            loss.backward()
            marks.append(_now(world))
            for copy, parameter in zip(copies, trained, strict=True):
                copy.grad = parameter.grad
            optimizer.step()
            marks.append(_now(world))
            taken[number] = torch.tensor([later - earlier for earlier, later in itertools.pairwise(marks)])
    forward_s, backward_s, update_s = taken.median(0).values.tolist()
    backward_s *= share / count
    slowest = torch.tensor([forward_s * share / count + backward_s + update_s, backward_s], device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest[0]), float(slowest[1])


def _now(world: World) -> float:
    if not world.device.startswith("cpu"):
        torch.accelerator.synchronize()
    return time.perf_counter()


def warm_up(update: Updater, loader: Loader, count: int) -> None:
    """Lets DDP see one backward pass, so that its buckets are the same in a fresh and in a resumed run.

    DDP orders its buckets by the gradients' arrival in the first pass and rebuilds them before the second; with three
    or more processes another order adds numbers up differently in their last bits (two add up alike in any order).
    """
    if update.world.size < 3 or update.network.sharded or update.network.cutting:
        return
    batch = _samples(loader, count)
    share = Share(0, count, (), ())
    with _unchanged(update.network.inner, update.norm), torch.random.fork_rng(devices=[]):
        update.gradients(Update([Pass(share, batch)], count), 0)
    update.measured.take()


def _samples(loader: Loader, count: int) -> Batch:
    batch = next(iter(loader.batches(0, [torch.arange(count)])))
    if len(batch.labels) != count:
        raise RunError(f"the data gave {len(batch.labels)} samples where {count} were asked for", "data")
    return batch


@contextmanager
def _unchanged(model: nn.Module, groups: NormGroups) -> Iterator[None]:
    """Gives buffers and gradients back as they were."""
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
        for parameter in model.parameters():
            parameter.grad = None
        for layer in groups.layers:
            layer.seen = None
