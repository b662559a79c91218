"""cluster.shares = auto: divides each update by the measured speeds of the processes."""

import dataclasses
import heapq
import itertools
import resource
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from manyhands.core.devices import is_accelerator
from manyhands.core.machine import memory
from manyhands.core.shares import Share
from manyhands.data.order import ALIGNED_SHARE_LIMIT, group_edges
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.train.feed import LoadedMicroBatch
from manyhands.train.trainer import Trainer
from manyhands.train.trial_step import first_samples, left_as_it_was, now

# A speed is the mean over a while, since a quota lets a process run at full speed and then not at all; of three whiles
# the median, since others on the machine come and go.
_WHILE_S, _WHILES = 0.4, 3
# Shares are taken where updates get quicker by more than this: two processes whose speeds differ by a tenth.
_GAIN = 1.05
# Measured anew at the start of an epoch, where that costs one part in so many of the time at most.
_SELDOM = 50


@dataclasses.dataclass
class BalancedShares:
    """Sets the shares at the start of an epoch, the same on all processes."""

    known: bool = False  # the shares in force were measured, here or where the run goes on from
    _set_s: float = dataclasses.field(default_factory=time.monotonic)
    _took_s: float = _WHILE_S * (_WHILES + 1)

    def balance(self, trainer: Trainer) -> None:
        """Measures speeds and sets the shares of the following updates; a collective.

        Runs at the start, and at the start of an epoch if enough time has passed.
        """
        if self.known and trainer.progress.step_in_epoch:
            return
        began_s = time.monotonic()
        if not broadcast_plain(not self.known or began_s - self._set_s > _SELDOM * self._took_s, trainer.world):
            return
        _set(trainer, _seconds_per_sample(trainer))
        self.known, self._set_s = True, time.monotonic()
        self._took_s = self._set_s - began_s
        trainer.status_round.leave_out(self._took_s)


def _set(trainer: Trainer, speeds_s: Sequence[float]) -> None:
    """Sets new shares from the seconds per sample, if that makes updates faster; a collective."""
    order, sharing, world = trainer.feed.order, trainer.feed.sharing, trainer.world
    most = broadcast_plain(gather_plain(_most(trainer), world), world)
    found = balanced(speeds_s, order.batch, sharing.group, most)
    slow_s = _longest(speeds_s, trainer.feed.samples_of_each())
    if tuple(found) == sharing.shares or slow_s <= _GAIN * _longest(speeds_s, found):
        return
    # That these fit into memory has been looked at: a run that goes on takes as many in one pass.
    trainer.feed.sharing = dataclasses.replace(sharing, shares=tuple(found)).within(0, min(order.batch, order.length))
    each = [round(1 / one, 1) for one in speeds_s]
    taken = trainer.feed.samples_of_each()
    counts, rates = (", ".join(f"{one:,.0f}" for one in numbers) for numbers in (taken, each))
    message = f"shares of the batch of {order.batch} samples, by process: {counts} (measured: {rates} samples/s)"
    trainer.journal.event("shares", message, trainer.progress.step, shares=taken, samples_per_s=each)


def balanced(speeds_s: Sequence[float], batch: int, group: int, most: Sequence[int]) -> list[int]:
    """Returns each process's samples of a batch so that all processes finish at about the same time.

    Args:
        speeds_s: seconds per sample of each process.
        batch: the number of samples, at least one for each process.
        group: the size of BatchNorm groups, which are split only if that saves much time; 0 without groups.
        most: the samples that fit into the memory of each process; their sum is at least the batch.
    """
    fine = _dealt(speeds_s, [1] * batch, most)
    if not group:
        return fine
    edges = group_edges(batch, group)
    sizes = [stop - start for start, stop in itertools.pairwise(edges)]
    whole = _dealt(speeds_s, sizes, most) if len(sizes) >= len(speeds_s) else fine
    costs_little = _longest(speeds_s, whole) <= ALIGNED_SHARE_LIMIT * _longest(speeds_s, fine)
    # Groups differ by one sample, so that a process at its limit may get one more than was counted.
    fits = all(count <= limit for count, limit in zip(whole, most, strict=True))
    return whole if costs_little and fits and sum(whole) == batch else fine


def _dealt(speeds_s: Sequence[float], sizes: Sequence[int], most: Sequence[int]) -> list[int]:
    """Parts of these sizes, each given to the one who would be done with it first; then in the order of ranks."""
    counts = [0] * len(speeds_s)
    parts = [0] * len(speeds_s)
    # The first ones go to whoever has none.
    waiting = [(0.0, rank) for rank in range(len(speeds_s))]
    for size in sizes:
        while waiting:
            _, rank = heapq.heappop(waiting)
            if parts[rank] and counts[rank] + size > most[rank]:
                continue
            counts[rank], parts[rank] = counts[rank] + size, parts[rank] + 1
            heapq.heappush(waiting, (speeds_s[rank] * (counts[rank] + size), rank))
            break
    # Sizes differ by one at most: which of them each has follows from how many it has.
    dealt = iter(sizes)
    return [sum(next(dealt) for _ in range(count)) for count in parts]


def _longest(speeds_s: Sequence[float], counts: Sequence[int]) -> float:
    return max(one * count for one, count in zip(speeds_s, counts, strict=True))


def _seconds_per_sample(trainer: Trainer) -> list[float]:
    """What each process takes for forward and backward of a sample, all at the same time, alone; a collective.

    The network is left as it was.
    """
    update, feed, world = trainer.update, trainer.feed, trainer.world
    equal = -(-feed.order.batch // world.size)
    count = min(equal, feed.sharing.micro_batch or equal)
    part = LoadedMicroBatch(Share(0, count, (), ()), first_samples(feed.loader, count), (0, count))
    micro_batch = part.micro_batch(count, 0)

    def mean_s(least_s: float) -> float:
        began_s, passes = now(world), 0
        while not passes or now(world) - began_s < least_s:
            update.gradients.forward_backward(micro_batch, count, last=False)
            passes += 1
        return (now(world) - began_s) / passes / count

    with left_as_it_was(update.network.model, update.network.norms), torch.random.fork_rng(devices=[]):
        mean_s(0.0)  # the first time is slower
        dist.barrier()
        own_s = statistics.median(mean_s(_WHILE_S) for _ in range(_WHILES))
    return broadcast_plain(gather_plain(own_s, world), world)


def _most(trainer: Trainer) -> int:
    """Samples of an update that surely fit into this process's memory.

    A pass of train.micro_batch is known to fit. Else the most that this process has ever taken stands for what an
    equal share needs, though the network is in it, and half of what is free may be given to more.
    """
    order, world = trainer.feed.order, trainer.world
    if trainer.feed.sharing.micro_batch:
        return order.batch
    if is_accelerator(world.device):
        card = torch.get_device_module(world.device)
        used = card.max_memory_allocated(world.device)
        free = max(0, card.mem_get_info(world.device)[0] + card.memory_reserved(world.device) - used)
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        free = memory()[1] // world.local_size  # of what its machine, or its container, has left
    equal = -(-order.batch // world.size)
    return min(order.batch, equal + int(equal * free / (2 * max(1, used))))
