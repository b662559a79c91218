"""Runs a network before training: for a trial step, timing, the order of DDP's buckets, and torch.compile."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from manyhands.config.job import TrainOptions
from manyhands.core.devices import wait_for_device
from manyhands.core.errors import RunError, UserError
from manyhands.core.quantities import short_time
from manyhands.core.seeds import derive_seed
from manyhands.core.world import World
from manyhands.data.loading import Loader
from manyhands.data.options import private_folder
from manyhands.data.transforms import Batch
from manyhands.parallel.gradients import Gradients, MicroBatchResult
from manyhands.parallel.group.plain import gather_plain
from manyhands.parallel.network import LossFn, ParallelNetwork, full_batch
from manyhands.parallel.replicas.batch_norm import NormGroups, record_inputs, set_rows_per_sample
from manyhands.train.feed import seeded_generators
from manyhands.train.step import Updater
from manyhands.train.trainer import Trainer

MOST_TIMED, TIMED = 64, 3  # the most samples of a timed pass; timed passes, of which the first is slower


class StepProbe:
    """Runs forward and backward outside training. An nn.Module runs on this process alone, without collectives."""

    def __init__(
        self, network: nn.Module | ParallelNetwork, loss_fn: LossFn | None, options: TrainOptions, world: World
    ) -> None:
        if isinstance(network, nn.Module):
            network, world = ParallelNetwork(network), World(device=world.device)
        self.network, self.options = network, options
        smoothing, precision = options.label_smoothing, options.precision
        self.gradients = Gradients(network, world, loss_fn, smoothing=smoothing, precision=precision)

    def run(self, batch: Batch, on_result: Callable[[MicroBatchResult], None] = lambda _: None) -> MicroBatchResult:
        """Computes the gradients of a batch's mean loss. Calls `on_result` with the outputs before backward."""
        count = len(batch.labels)
        return self.gradients.forward_backward(full_batch(batch.images, batch.labels), count, on_result=on_result)


@dataclass(frozen=True)
class TrialResult:
    """Findings about a network from a forward and backward pass before training."""

    unused: list[str]  # names of trainable parameters that got no gradient
    draws: bool  # the training pass or the loss draws random numbers
    outputs: int = 0  # outputs of the network, at least one for each class; 0 if it wasn't run
    count: int = 2  # samples of the trial step


def run_trial(probe: StepProbe, loader: Loader, classes: int, count: int) -> TrialResult:
    """Runs forward and backward on `count` samples, on this process alone, and restores the network."""
    model, batch = probe.network.model, first_samples(loader, count)
    seed, device = derive_seed(probe.options.seed, "rehearse"), batch.labels.device.type

    def check_shape(_module: nn.Module, _inputs: Any, output: Any) -> None:
        # Checked before the loss, because labels beyond the outputs make an accelerator unusable.
        main = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(main, Tensor) and main.ndim == 2 and len(main) == count:
            _check_outputs(main.shape, count, classes)

    with restored_network(probe.network), seeded_generators(seed, device) as drawn:
        with model.register_forward_hook(check_shape), record_inputs(probe.network.norms.layers) as seen:
            given = probe.run(batch, lambda found: _check_outputs(found.logits.shape, count, classes))
        trained = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
        unused = [name for name, gradient in trained.items() if gradient is None]
        # If no parameter got a gradient, the output is of a type in which tensors aren't found.
        found = TrialResult(unused if len(unused) < len(trained) else [], drawn(), given.logits.shape[1], count)
        set_rows_per_sample(model, seen, batch.images)
        return found


def _check_outputs(shape: torch.Size, count: int, classes: int) -> None:
    """Raises UserError unless the outputs have one row per sample and at least one column per class."""
    rows = len(shape) == 2 and shape[0] == count
    if not rows or shape[1] < classes:
        hints = (f"return outputs of shape [{count}, {classes}]", f"or add --set model.num_classes={shape[-1]}")
        hints += (f"or number the labels from 0 to {shape[1] - 1}",) if rows and shape[1] > 1 else ()
        what = f"the network's output has the shape {list(shape)} for {count} pictures and {classes} classes"
        raise UserError(what, "model.name", hints)


def time_sample(model: nn.Module, images: Tensor, world: World) -> float:
    """Estimates an update's seconds per sample. Returns 0 on accelerators, or if a forward pass fails. A collective."""
    if world.device != "cpu":
        return 0.0
    taken: list[float] = []
    model.eval()
    with torch.no_grad(), seeded_generators(0, world.device), suppress(Exception):
        for _ in range(2):  # the first pass also sets things up
            started = synchronized_time(world)
            model(images)
            taken.append(synchronized_time(world) - started)
    model.train()
    # A backward pass takes about twice as long as a forward pass.
    return 3 * max(gather_plain(min(taken, default=0.0), world)) / len(images)


def time_step(probe: StepProbe, loader: Loader, share: int, world: World) -> tuple[float, float]:
    """Returns the slowest process's seconds for an update of `share` samples and for its backward. A collective."""
    count = min(share, MOST_TIMED, probe.options.micro_batch or share)
    batch = first_samples(loader, count)
    trained = [parameter for parameter in probe.network.model.parameters() if parameter.requires_grad]
    # Copies are updated: even with a learning rate of 0, gradients that overflow would change parameters.
    copies = [parameter.detach().clone() for parameter in trained]
    optimizer = torch.optim.SGD(copies, lr=0.0, momentum=0.9)
    taken: list[list[float]] = []
    with restored_network(probe.network), torch.random.fork_rng(devices=[]):
        for _ in range(TIMED):
            for parameter in trained:
                parameter.grad = None
            marks = [synchronized_time(world)]
            probe.run(batch, lambda _, marks=marks: marks.append(synchronized_time(world)))
            marks.append(synchronized_time(world))
            for copy, parameter in zip(copies, trained, strict=True):
                copy.grad = parameter.grad
            optimizer.step()
            marks.append(synchronized_time(world))
            taken.append(marks)
    forward_s, backward_s, update_s = torch.tensor(taken, dtype=torch.float64).diff().median(0).values.tolist()
    backward_s *= share / count
    slowest = torch.tensor([forward_s * share / count + backward_s + update_s, backward_s], device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest[0]), float(slowest[1])


def synchronized_time(world: World) -> float:
    """Waits until the device has finished its work. Returns the current time in seconds."""
    wait_for_device(world.device)
    return time.perf_counter()


def warm_up(updater: Updater, loader: Loader, count: int) -> None:
    """Runs one backward pass, which fixes the order of DDP's buckets in new and resumed runs. A collective."""
    # With three or more processes, the order of a sum changes its last bits. Parameters and buffers don't change.
    if updater.world.size < 3 or not updater.network.traits.orders_sums:
        return
    probe = StepProbe(updater.network, updater.loss_fn or sum_outputs_as_loss, updater.options, updater.world)
    with restored_network(updater.network), torch.random.fork_rng(devices=[]):
        probe.run(first_samples(loader, count))
        probe.gradients.finish()


def sum_outputs_as_loss(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces an unknown custom loss. Returns the sum [] of all outputs, and empty logits [n, 0]."""
    zero = torch.zeros((), device=labels.device, requires_grad=True)
    found = (one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad)
    return sum((one.float().sum() for one in found), zero), labels.new_zeros(len(labels), 0)


def first_samples(loader: Loader, count: int) -> Batch:
    """Returns the first `count` training samples of epoch 0."""
    batch = next(iter(loader.batches(0, [torch.arange(count)])))
    if len(batch.labels) != count:
        raise RunError(f"the data set returned {len(batch.labels)} samples instead of {count}", "data")
    return batch


@contextmanager
def restored_network(network: ParallelNetwork) -> Iterator[None]:
    """Restores the buffers and clears the gradients of a network after the context."""
    model = network.model
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        for parameter in model.parameters():
            parameter.grad = None
        for layer in network.norms.layers:
            layer.accumulated = None


def set_compile_cache() -> None:
    """Stores torch's compiled code in a folder of this user, unless TORCHINDUCTOR_CACHE_DIR is set."""
    # torch's default folder is in /tmp, where any user can create it first, and its files are executed.
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if not named or Path(named).name.startswith("torchinductor_"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_folder("compiled"))


class _CompiledForward:
    """Replaces a network's `__call__`. Compiles while `learning`. Later, input of an unknown size runs eagerly."""

    def __init__(self, model: nn.Module, norms: NormGroups) -> None:
        set_compile_cache()
        self._model, self._norms, self.learning, self.used = model, norms, True, False
        model.compile(dynamic=False)
        self._compiled: Any = model._compiled_call_impl
        model._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._norms.shared_sizes:  # other processes take part in this pass
            return self._model._call_impl(*args, **kwargs)
        self.used |= self.learning
        with torch.compiler.set_stance("default" if self.learning else "eager_on_recompile"):
            return self._compiled(*args, **kwargs)


def compile_updates(trainer: Trainer) -> None:
    """Compiles the passes of an update before training, so that compilation isn't reported as a stall. A collective."""
    network, updater, feed = trainer.network, trainer.updater, trainer.feed
    calls, count = _CompiledForward(network.model, network.norms), min(feed.order.batch, feed.order.length)
    world, began = trainer.world, time.monotonic()
    gradients = StepProbe(network, updater.loss_fn, updater.options, world).gradients
    message = "compiling the network, which may take some minutes; compiled code is cached for the next run"
    if not network.norms.shared_sizes:
        trainer.journal.event("note", message)
    seed = derive_seed(updater.options.seed, "compile")
    with restored_network(network), seeded_generators(seed, world.device):
        for shares in feed.sharing.micro_batches(count):
            batch = first_samples(feed.loader, max(1, shares[network.share.index].count))
            gradients.forward_backward(feed.micro_batch(shares, batch, count), count, last=False)
    calls.learning = False
    message = "torch.compile is skipped: processes share BatchNorm groups (train.norm_group)"
    if calls.used:
        message = f"compiled the network in {short_time(time.monotonic() - began)}"
    trainer.journal.event("note", message)
    trainer.resources.callback(setattr, network.model, "_compiled_call_impl", None)
