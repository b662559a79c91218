"""The samples of this process for each update, seeds of random numbers, and sums of measurements."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.core.world import Share
from manyhands.data import samples as data_samples
from manyhands.data.loading import Loader
from manyhands.data.order import BatchSharing, Order, equal_share_function
from manyhands.data.transforms import Batch
from manyhands.parallel.network import MicroBatch, MicroBatchShape

COUNTED_AT_ONCE = 1 << 16  # logits that are counted together
_KNOWN = ("torch.nn.modules.", "torch.nn.parallel.", "manyhands.")  # packages whose layers use only torch's generators

UpdateShare = list[MicroBatch]  # the micro-batches of this process for one update, at least one


@dataclass
class Feed:
    """Yields the micro-batches of each update, starting at any step of any epoch."""

    order: Order
    sharing: BatchSharing
    loader: Loader
    rank: int  # index of this process among the processes that divide the samples
    augment: str = "none"  # augmentation of pictures

    def updates(self, epoch: int, first_step: int) -> Iterator[UpdateShare]:
        batches = self.loader.batches(epoch, self._sample_requests(epoch, first_step))
        for step in range(first_step, self.order.steps_per_epoch):
            count = min(self.order.batch, self.order.length - step * self.order.batch)
            yield [self.micro_batch(shares, next(batches), count) for shares in self.sharing.micro_batches(count)]

    def micro_batch(self, shares: Sequence[Share], batch: Batch, count: int) -> MicroBatch:
        """Builds this process's micro-batch. `shares`: all processes' shares. `count`: samples in the update."""
        bounds = shares[0].start, shares[-1].stop
        shape = MicroBatchShape(bounds[1] - bounds[0], count, equal_share_function(count, self.sharing.group, bounds))
        return MicroBatch(batch.images, batch.labels, shares[self.rank], shape, batch.samples)

    def samples_by_rank(self) -> list[int]:
        """Returns the number of samples of each rank in an update with a full batch."""
        parts = self.sharing.micro_batches(min(self.order.batch, self.order.length))
        return [sum(share.count for share in shares) for shares in zip(*parts, strict=True)]

    def _sample_requests(self, epoch: int, first_step: int) -> Iterator[Tensor]:
        for samples in self.order.batches(epoch, first_step):
            for shares in self.sharing.micro_batches(len(samples)):
                share = shares[self.rank]
                start, stop = share.start, max(share.stop, share.start + 1)
                # A process with an empty share computes one sample of weight zero.
                yield samples[start:stop] if start < len(samples) else samples[:1]


@dataclass
class StepSums:
    """Sums over this process's samples since the last `take_sums`, kept on the device to avoid synchronization."""

    loss: Tensor | float = 0.0  # sum of losses
    samples: int = 0  # samples that this process reports
    bad_loss_step: Tensor | float = math.inf  # first step with a non-finite loss; infinite: none; not reset
    bad_gradient_step: Tensor | float = math.inf  # first step that the accelerator skipped for its gradients; as above
    _correct: float | Tensor = 0.0
    _guesses: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # replaced, not cleared: marks refer to it

    def add_predictions(self, logits: Tensor, labels: Tensor) -> None:
        """Counts the correct predictions in logits [n, C] for labels int64 [n], in a later call if there are few."""
        self._guesses.append((logits, labels))
        if len(self._guesses) * logits.numel() >= COUNTED_AT_ONCE:
            self._count_predictions()

    def skip_predictions(self) -> None:
        self._correct = math.nan

    def take_sums(self) -> tuple[float, float, int]:
        """Returns, since the last call, the sum of losses and the numbers of correct and of all samples."""
        self._count_predictions()
        # NaN also reports a non-finite gradient.
        loss = float(self.loss) if float(self.bad_gradient_step) == math.inf else math.nan
        values = loss, float(self._correct), self.samples
        self.loss, self._correct, self.samples = 0.0, 0.0, 0
        return values

    def copy_sums(self) -> tuple[Any, ...]:
        return self.loss, self.samples, self._correct, self._guesses, len(self._guesses)

    def restore_sums(self, mark: tuple[Any, ...]) -> None:
        self.loss, self.samples, self._correct, self._guesses, guesses = mark
        del self._guesses[guesses:]

    def _count_predictions(self) -> None:
        if self._guesses:
            logits, labels = (torch.cat(tensors) for tensors in zip(*self._guesses, strict=True))
            self._correct = self._correct + (logits.argmax(1) == labels).sum()
            self._guesses = []


def uses_torch_rng_alone(model: nn.Module) -> bool:
    """Returns True if all layers are torch's or manyhands' without hooks, so forward uses only torch's generators."""

    def is_known(layer: nn.Module) -> bool:
        own = vars(layer)
        changed = "forward" in own or any(own[name] for name in own if name.endswith("_hooks"))
        return not changed and all(kind.__module__.startswith(_KNOWN) for kind in type(layer).__mro__[:-1])

    return all(map(is_known, model.modules()))


def seed_generators(seed: int, device: str, *, torch_alone: bool = False) -> None:
    """Seeds the generators of torch and, unless `torch_alone`, of random and numpy. `device`: such as cuda:0 or cpu."""
    if device != "cpu":  # on a CPU, this call would store a traceback for each kind of unused accelerator
        torch.manual_seed(seed)
    if torch_alone:  # seeding the others takes 2 % of a small network's update
        torch.default_generator.manual_seed(seed)
    else:
        data_samples.seed_generators(seed)


@contextmanager
def seeded_generators(seed: int, device: str) -> Iterator[Callable[[], bool]]:
    """Seeds all generators within the context. Yields a function that returns True if random numbers were drawn."""
    before = None if device == "cpu" else torch.get_device_module(device).get_rng_state()
    with data_samples.restored_generators():
        seed_generators(seed, device)
        seeded = _rng_states(device)
        try:
            yield lambda: _rng_states(device) != seeded
        finally:
            if before is not None:
                torch.get_device_module(device).set_rng_state(before)


def _rng_states(device: str) -> tuple[object, ...]:
    """Returns the states of all generators, which can be compared with ==."""
    accelerator = [] if device == "cpu" else [torch.get_device_module(device).get_rng_state()]
    tensors = [state.numpy().tobytes() for state in (torch.get_rng_state(), *accelerator)]
    of_numpy = np.random.get_state(legacy=False)["state"]
    return *tensors, random.getstate(), of_numpy["key"].tobytes(), of_numpy["pos"]
