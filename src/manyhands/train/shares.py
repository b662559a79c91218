"""Divides the samples of each update among the processes: equally, by the job's shares, or by measured speeds."""

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

from manyhands.config.job import Job
from manyhands.core.devices import is_accelerator
from manyhands.core.errors import UserError
from manyhands.core.machine import memory_bytes
from manyhands.core.world import check_batch
from manyhands.data.order import ALIGNED_SHARE_LIMIT, BatchSharing, Order, group_boundaries
from manyhands.parallel.apply import normalizes_in_groups
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.parallel.network import ParallelNetwork, full_batch
from manyhands.parallel.options import USUAL_MODE
from manyhands.parallel.replicas.batch_norm import GroupedNorm
from manyhands.train.journal import RunContext
from manyhands.train.state import Resumable
from manyhands.train.trainer import Trainer
from manyhands.train.trial_step import first_samples, restored_network, synchronized_time

MACHINES = "machines"  # the default: measure speeds if the machines are of several kinds
_WHERE, _EQUAL = "cluster.shares", "add --set cluster.shares=equal"
_WHILE_S, _WHILES = 0.4, 3  # a speed is the median of so many means over so many seconds, as CPU quotas are bursts
_GAIN = 1.05  # smallest speedup that changes shares, as of two processes whose speeds differ by a tenth
_SELDOM = 50  # measure again at the start of an epoch if that takes at most this fraction of time: 1 / 50


def order_and_sharing(
    run: RunContext, samples: int, network: ParallelNetwork, previous: list[int] | None, *, own_groups: bool, limit: int
) -> tuple[Order, BatchSharing]:
    """Returns the order of the samples, and the division of each update among processes.

    `previous`, `limit`: the result of `previous_shares`. `own_groups`: True if each process normalizes its own samples.
    """
    job, mode = run.job, run.mode
    options, replicas = job.train, network.share.parts
    check_batch(options.batch, replicas)
    batch, group = min(options.batch, samples), 0
    # Without BatchNorm there are no groups that must fit into a pass.
    layers = any(isinstance(module, GroupedNorm) for module in network.model.modules())
    if options.norm_group != "local" and not own_groups and normalizes_in_groups(mode) and layers:
        group = batch if options.norm_group == "global" else options.norm_group
    why = _reason_for_equal_shares(job, mode, network, own_groups=own_groups)
    if why and replicas > 1 and job.cluster.shares not in {"equal", MACHINES}:
        hints = ("set --parallel data --sync allreduce", f"or {_EQUAL}")
        raise UserError(f"cluster.shares can't be used: {why}", _WHERE, hints)
    shares = () if why and job.cluster.shares == MACHINES else _requested_shares(run, replicas, previous)
    sharing = BatchSharing(replicas, options.micro_batch, group, aligned=not network.share.together, shares=shares)
    within = sharing.limited(limit, batch)
    if within.micro_batch != sharing.micro_batch:
        passes, largest = len(within.micro_batches(batch)), within.largest_share(batch)
        said = f"each process computes an update in {passes} micro-batches of at most {limit} samples, "
        said += "the limit from the start of the run"
        if largest > limit:
            said = f"micro-batches now have up to {largest} samples, not {limit}, because train.norm_group is {group}"
        run.journal.event("note", f"{said} (with enough memory, add --set train.micro_batch={batch})", 0)
    return Order(samples, batch, options.seed, options.drop_last), within


def _requested_shares(run: RunContext, replicas: int, previous: list[int] | None) -> tuple[int, ...]:
    """Returns the samples of each of `replicas` processes, by the job or the checkpoint, or () for equal shares."""
    job, shares = run.job, run.job.cluster.shares
    if isinstance(shares, str):
        fits = shares != "equal" and previous and len(previous) == replicas
        return tuple(previous or ()) if fits else ()
    if sum(shares) != job.train.batch:
        what = f"the sum of cluster.shares {list(shares)} is {sum(shares)}, but train.batch is {job.train.batch}"
        raise UserError(what, _WHERE, (f"set --batch {sum(shares)}", "or correct the shares", f"or {_EQUAL}"))
    if len(shares) == replicas:
        message = f"shares of the batch of {job.train.batch} samples, by process: {', '.join(map(str, shares))}"
        run.journal.event("shares", message, 0, shares=list(shares))
        return shares
    what = f"cluster.shares has {len(shares)} number(s) for {replicas} processes"
    if previous is None:
        raise UserError(what, _WHERE, ("write one number for each process", f"or {_EQUAL}"))
    run.journal.event("warning", f"{what}; using equal shares", 0)
    return ()


def _reason_for_equal_shares(job: Job, mode: str, network: ParallelNetwork, *, own_groups: bool) -> str:
    """Returns why the mode or the sync method doesn't support the job's shares, or "" if both support them."""
    if network.share.together:
        return f"--parallel {mode} splits each batch into equal parts"
    if job.cluster.shares in {"auto", MACHINES} and mode != USUAL_MODE:
        return f"with --parallel {mode}, each layer waits for all processes, so their speed can't be measured"
    if own_groups:
        return f"--sync {job.sync.method} normalizes each process's own samples, so shares would change the result"
    return ""


def previous_shares(found: Resumable | None) -> tuple[list[int] | None, int]:
    """Returns a checkpoint's shares ([]: equal; None: no checkpoint) and its largest micro-batch (0: unknown)."""
    if found is None:
        return None, 0
    kept, most = found.snapshot.state.get("shares", []), int(found.snapshot.state.get("most_in_a_pass", 0))
    # Unchecked data: the checkpoint may come from another tool.
    valid = kept is None or (isinstance(kept, list) and all(type(one) is int and one > 0 for one in kept))
    return kept if valid else [], most


def refuse_small_micro_batches(order: Order, batch_sharing: BatchSharing, network: ParallelNetwork) -> None:
    """Raises UserError if an op shards the batch into more parts than a micro-batch has samples."""
    parts, counts = network.share.most_parts, {min(order.batch, order.length)}
    if not order.drop_last:
        counts.add(order.length - (order.steps_per_epoch - 1) * order.batch)
    for count in counts:
        least = min(shares[-1].stop - shares[0].start for shares in batch_sharing.micro_batches(count))
        if least < parts:
            what = f"an op shards the batch over {parts} processes, but a micro-batch has only {least} sample(s)"
            left = f"{order.length} samples in batches of {order.batch} leave a last batch of {least}"
            hints = (f"change --batch: {left}", "or drop the last batch: --train.drop-last")
            raise UserError(what, "train.batch", hints)


class ShareBalancer:
    """Sets shares by measured speeds at the start of epochs. `measured`: True if an earlier start did so."""

    def __init__(self, *, measured: bool) -> None:
        self._known, self._set_s, self._took_s = measured, time.monotonic(), _WHILE_S * (_WHILES + 1)

    def balance(self, trainer: Trainer) -> None:
        """Measures speeds and sets the shares. In later epochs, does so only if it takes little time. A collective."""
        if self._known and trainer.progress.step_in_epoch:
            return
        began_s = time.monotonic()
        if not broadcast_plain(not self._known or began_s - self._set_s > _SELDOM * self._took_s, trainer.world):
            return
        order, sharing, speeds_s = trainer.feed.order, trainer.feed.sharing, _seconds_per_sample(trainer)
        found = balanced(speeds_s, order.batch, sharing.group, gather_plain(_samples_that_fit(trainer), trainer.world))
        slow_s = _slowest_s(speeds_s, trainer.feed.samples_by_rank())
        if tuple(found) != sharing.shares and slow_s > _GAIN * _slowest_s(speeds_s, found):
            # These shares fit into memory, so each can be one pass, also in a resumed run.
            pieces = dataclasses.replace(sharing, shares=tuple(found)).limited(0, min(order.batch, order.length))
            trainer.feed.sharing = pieces
            each, taken = [round(1 / one, 1) for one in speeds_s], trainer.feed.samples_by_rank()
            counts, rates = (", ".join(f"{one:,.0f}" for one in numbers) for numbers in (taken, each))
            said = f"shares of the batch of {order.batch} samples, by process: {counts} (measured: {rates} samples/s)"
            trainer.journal.event("shares", said, trainer.progress.step, shares=taken, samples_per_s=each)
        self._known, self._set_s = True, time.monotonic()
        self._took_s = self._set_s - began_s
        trainer.status_round.exclude_time(self._took_s)


def balanced(sample_s: Sequence[float], batch: int, norm_group: int, limits: Sequence[int]) -> list[int]:
    """Returns each process's number of samples of a batch, at least 1, so that all finish at about the same time.

    `sample_s`: each process's seconds per sample. `norm_group`: samples in a BatchNorm group (0: no groups). Groups are
    split only if that saves much time. `limits`: the samples that fit into each process's memory.
    """
    fine = _assign_to_fastest(sample_s, [1] * batch, limits)
    if not norm_group:
        return fine
    sizes = [stop - start for start, stop in itertools.pairwise(group_boundaries(batch, norm_group))]
    whole = _assign_to_fastest(sample_s, sizes, limits) if len(sizes) >= len(sample_s) else fine
    costs_little = _slowest_s(sample_s, whole) <= ALIGNED_SHARE_LIMIT * _slowest_s(sample_s, fine)
    # Sizes of groups differ by one sample, so a process at its limit may get one sample too many.
    fits = all(count <= limit for count, limit in zip(whole, limits, strict=True))
    return whole if costs_little and fits and sum(whole) == batch else fine


def _assign_to_fastest(sample_s: Sequence[float], sizes: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Assigns parts of `sizes` samples, each to the rank that would finish it first. Returns each rank's samples."""
    counts, parts = [0] * len(sample_s), [0] * len(sample_s)
    # Processes without a part come first.
    waiting = [(0.0, rank) for rank in range(len(sample_s))]
    for size in sizes:
        while waiting:
            _, rank = heapq.heappop(waiting)
            if parts[rank] and counts[rank] + size > limits[rank]:
                continue
            counts[rank], parts[rank] = counts[rank] + size, parts[rank] + 1
            heapq.heappush(waiting, (sample_s[rank] * (counts[rank] + size), rank))
            break
    # Parts are handed out in the order of ranks; their sizes differ by one at most.
    dealt = iter(sizes)
    return [sum(next(dealt) for _ in range(count)) for count in parts]


def _slowest_s(sample_s: Sequence[float], counts: Sequence[int]) -> float:
    return max(one * count for one, count in zip(sample_s, counts, strict=True))


def _seconds_per_sample(trainer: Trainer) -> list[float]:
    """Times forward and backward on all processes at once. Returns each rank's seconds per sample. A collective."""
    updater, feed, world = trainer.updater, trainer.feed, trainer.world
    equal = -(-feed.order.batch // world.size)
    count = min(equal, feed.sharing.micro_batch or equal)
    batch = first_samples(feed.loader, count)
    micro_batch = full_batch(batch.images, batch.labels)

    def mean_s(least_s: float) -> float:
        began_s, passes = synchronized_time(world), 0
        while not passes or synchronized_time(world) - began_s < least_s:
            updater.gradients.forward_backward(micro_batch, count, last=False)
            passes += 1
        return (synchronized_time(world) - began_s) / passes / count

    with restored_network(updater.network), torch.random.fork_rng(devices=[]):
        mean_s(0.0)  # the first pass is slower
        dist.barrier()
        own_s = statistics.median(mean_s(_WHILE_S) for _ in range(_WHILES))
    return gather_plain(own_s, world)


def _samples_that_fit(trainer: Trainer) -> int:
    """Estimates the number of samples that fit into this process's memory: with train.micro_batch, the entire batch.

    The peak memory so far is assumed to be that of an equal share. Further samples may use half of the free memory.
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
        free = memory_bytes()[1] // world.local_size  # a fraction of the free memory of the machine or container
    equal = -(-order.batch // world.size)
    return min(order.batch, equal + int(equal * free / (2 * max(1, used))))
