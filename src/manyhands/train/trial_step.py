"""A trial step on two samples before training: finds errors early and fixes DDP's buckets."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from manyhands.config.job import Job
from manyhands.core.devices import wait_for
from manyhands.core.errors import RunError, UserError
from manyhands.core.seeds import derive
from manyhands.core.shares import Share
from manyhands.core.world import World
from manyhands.data.loading import Loader
from manyhands.data.transforms import Batch
from manyhands.parallel.gradients import Gradients, MicroBatchResult
from manyhands.parallel.group.plain import gather_plain
from manyhands.parallel.network import LossFn, ParallelNetwork, full_batch
from manyhands.parallel.replicas.batch_norm import NormGroups, set_rows_per_sample, watching
from manyhands.train.draws import drawing
from manyhands.train.feed import LoadedMicroBatch
from manyhands.train.step import Updater

# Samples of a share that are timed, and how often; the first time is slower.
MOST_TIMED, TIMED = 64, 3


@dataclass(frozen=True)
class TrialStep:
    """The inputs of a trial step."""

    model: nn.Module  # the network, before its parallel mode
    groups: NormGroups  # of its BatchNorm layers
    loader: Loader  # of training samples
    loss_fn: LossFn  # the loss; `sum_of_outputs` where it is the user's own
    job: Job  # that it is for

    def gradients(self, world: World) -> Gradients:
        """Returns the object that computes gradients of the network on one process."""
        network = ParallelNetwork(self.model, self.model)
        return Gradients(network, World(device=world.device), self.loss_fn, precision=self.job.train.precision)


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial step."""

    unused: list[str]  # names of trainable parameters that got no gradient
    draws: bool  # True where its training pass or its loss draws random numbers
    outputs: int = 0  # how many it has; at least as many as there are classes. 0: it wasn't tried
    count: int = 2  # samples that it was tried on


def run_trial(trial_step: TrialStep, classes: int, count: int, world: World) -> TrialResult:
    """Runs the network once on `count` samples on this process alone and restores it.

    Random numbers follow from the job's seed, so all processes get the same result.

    Raises:
        UserError: the network's output doesn't fit the data.
    """
    model, batch = trial_step.model, first_samples(trial_step.loader, count)
    seed, device = derive(trial_step.job.train.seed, "rehearse"), batch.labels.device.type

    def check(found: MicroBatchResult) -> None:
        _check_outputs(found.logits.shape, count, classes)

    def check_first(_module: nn.Module, _inputs: Any, output: Any) -> None:
        # A loss of labels beyond the outputs fails with an error of torch's, on an accelerator for good.
        main = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(main, Tensor) and main.ndim == 2 and len(main) == count:
            _check_outputs(main.shape, count, classes)

    with left_as_it_was(model, trial_step.groups), drawing(seed, device) as drawn:
        hook = model.register_forward_hook(check_first)
        try:
            with watching(trial_step.groups.layers) as seen:
                given = trial_step.gradients(world).forward_backward(
                    full_batch(batch.images, batch.labels), count, on_result=check
                )
        finally:
            hook.remove()
        trained = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
        unused = [name for name, gradient in trained.items() if gradient is None]
        # Of an output of the user's own kind, in which no tensors are found, nothing is learnt.
        unused = [] if len(unused) == len(trained) else unused
        found = TrialResult(unused, drawn(), given.logits.shape[1], count)
        set_rows_per_sample(model, seen, batch.images)
        return found


def _check_outputs(shape: torch.Size, count: int, classes: int) -> None:
    """Raises UserError for outputs that aren't one row for each sample with a number for each class."""
    if len(shape) != 2 or shape[0] != count or shape[1] < classes:
        counts = len(shape) == 2 and shape[0] == count and shape[1] > 1
        raise UserError(
            f"the network's output has the shape {list(shape)} for {count} pictures and {classes} classes",
            "model.name",
            (
                f"return outputs of shape [{count}, {classes}]",
                f"or add --set model.num_classes={shape[-1]}",
                *([f"or number the labels from 0 to {shape[1] - 1}"] if counts else []),
            ),
        )


def time_sample(model: nn.Module, images: Tensor, world: World) -> float:
    """Returns seconds of an update per sample, on the slowest process, estimated from forward passes; a collective.

    Returns 0 if the network can't be called with images [n, …], or on an accelerator, where few samples say little.
    """
    if world.device != "cpu":
        return 0.0
    taken: list[float] = []
    model.eval()
    with torch.no_grad(), drawing(0, world.device), suppress(Exception):
        for _ in range(2):  # the first pass also sets things up
            started = now(world)
            model(images)
            taken.append(now(world) - started)
    model.train()
    # A backward pass takes about twice as long as a forward pass.
    return 3 * max(gather_plain(min(taken, default=0.0), world)) / len(images)


def time_step(trial_step: TrialStep, share: int, world: World) -> tuple[float, float]:
    """Times an update of `share` samples without communication, on the slowest process; a collective.

    The network is restored. A large share is estimated from a part of it.

    Returns:
        Seconds of the whole update, and of its backward pass.
    """
    # Of a pass of micro_batch it is known that it fits into memory.
    count, model = min(share, MOST_TIMED, trial_step.job.train.micro_batch or share), trial_step.model
    batch, gradients = first_samples(trial_step.loader, count), trial_step.gradients(world)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Copies are moved: even a step of no length would spoil parameters where a gradient overflows.
    copies = [parameter.detach().clone() for parameter in trained]
    optimizer = torch.optim.SGD(copies, lr=0.0, momentum=0.9)
    taken = torch.zeros(TIMED, 3, dtype=torch.float64)
    with left_as_it_was(model, trial_step.groups), torch.random.fork_rng(devices=[]):
        for number in range(TIMED):
            for parameter in trained:
                parameter.grad = None
            marks = [now(world)]
            gradients.forward_backward(
                full_batch(batch.images, batch.labels), count, on_result=lambda _, marks=marks: marks.append(now(world))
            )
            marks.append(now(world))
            for copy, parameter in zip(copies, trained, strict=True):
                copy.grad = parameter.grad
            optimizer.step()
            marks.append(now(world))
            taken[number] = torch.tensor([later - earlier for earlier, later in itertools.pairwise(marks)])
    forward_s, backward_s, update_s = taken.median(0).values.tolist()
    backward_s *= share / count
    slowest = torch.tensor([forward_s * share / count + backward_s + update_s, backward_s], device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest[0]), float(slowest[1])


def now(world: World) -> float:
    """Returns the time in seconds after the device has finished its work."""
    wait_for(world.device)
    return time.perf_counter()


def warm_up(update: Updater, loader: Loader, count: int) -> None:
    """Runs one backward pass in DDP, so that its buckets are the same in a new and in a resumed run.

    DDP orders its buckets by the gradients' arrival in the first pass and rebuilds them before the second; with three
    or more processes another order adds numbers up differently in their last bits (two add up alike in any order).
    """
    if update.world.size < 3 or not update.network.traits.orders_sums:
        return
    batch = first_samples(loader, count)
    whole, options = Share(0, count, (), ()), update.options
    loss_fn, smoothing = update.loss_fn or sum_of_outputs, options.label_smoothing
    gradients = Gradients(update.network, update.world, loss_fn, smoothing=smoothing, precision=options.precision)
    with left_as_it_was(update.network.model, update.network.norms), torch.random.fork_rng(devices=[]):
        gradients.forward_backward(LoadedMicroBatch(whole, batch).micro_batch(count, 0), count)
        gradients.finish()


def sum_of_outputs(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces an unknown custom loss: returns the sum [] of all outputs, and empty logits [n, 0]."""
    zero = torch.zeros((), device=labels.device, requires_grad=True)
    return sum((one.float().sum() for one in tensors_of(output)), zero), labels.new_zeros(len(labels), 0)


def tensors_of(output: Any) -> list[Tensor]:
    """Returns the tensors in an output that require gradients."""
    return [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]


def first_samples(loader: Loader, count: int) -> Batch:
    """Returns the first `count` training samples of epoch 0."""
    batch = next(iter(loader.batches(0, [torch.arange(count)])))
    if len(batch.labels) != count:
        raise RunError(f"the data set returned {len(batch.labels)} samples instead of {count}", "data")
    return batch


@contextmanager
def left_as_it_was(model: nn.Module, groups: NormGroups) -> Iterator[None]:
    """Restores buffers and gradients afterwards."""
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
