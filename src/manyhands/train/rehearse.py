"""A first pass over two samples before anything counts: mistakes come out at once, and DDP settles its buckets."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from manyhands.config.job import Job
from manyhands.core.errors import RunError, UserError
from manyhands.data.loader import Batch, Loader
from manyhands.data.order import Share
from manyhands.parallel.norm import NormGroups
from manyhands.train.criterion import Criterion
from manyhands.train.feed import Pass, Update
from manyhands.train.step import AUTOCAST, Updater


def rehearse(
    model: nn.Module, groups: NormGroups, loader: Loader, criterion: Criterion, classes: int, count: int, job: Job
) -> list[str]:
    """Runs the network once on this process alone and leaves it as it was.

    Returns:
        Names of trainable parameters that got no gradient.

    Raises:
        UserError: the network's output doesn't fit the data.
    """
    batch = _samples(loader, count)
    groups.begin_pass((), (), count, count)
    kind = AUTOCAST.get(job.train.precision)
    with _unchanged(model, groups), torch.random.fork_rng(devices=[]):
        with torch.autocast(batch.labels.device.type, dtype=kind, enabled=kind is not None):
            output = model(batch.images)
            loss, logits = criterion(output, batch.labels)
        if logits.ndim != 2 or logits.shape[0] != count or logits.shape[1] < classes:
            raise UserError(
                f"the network's output is {list(logits.shape)} for {count} pictures of {classes} classes",
                "model.name",
                (f"it should be [{count}, {classes}]", f"--set model.num_classes={logits.shape[-1]} if that is meant"),
            )
        loss.backward()
        return [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]


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
