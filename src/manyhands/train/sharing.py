"""Divides the samples of each update among the processes of a run."""

from typing import Any

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.shares import check_batch
from manyhands.data.order import BatchSharing, Order
from manyhands.data.splits import Splits
from manyhands.parallel.apply import normalises_in_groups
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.options import USUAL_MODE
from manyhands.parallel.replicas.batch_norm import GroupedNorm
from manyhands.train.journal import Journal
from manyhands.train.recover import Resumable

# The default: speeds are measured where machines of several kinds take part.
MACHINES = "machines"
_WHERE, _EQUAL = "cluster.shares", "add --set cluster.shares=equal"


def order_and_sharing(  # noqa: PLR0913 - what a batch meets before it is shared out
    job: Job,
    splits: Splits,
    mode: str,
    network: ParallelNetwork,
    journal: Journal,
    kept: list[int] | None,
    *,
    own: bool = False,
    most: int = 0,
) -> tuple[Order, BatchSharing]:
    """Determines the samples of each update, and their division among processes.

    Args:
        job: supplies the batch size.
        splits: the data.
        mode: the parallel mode.
        network: under it.
        journal: records unequal shares.
        own: each process trains alone, with its own BatchNorm groups.
        most: the largest micro-batch at the start of the run; 0 if unknown.
        kept: the shares in the checkpoint, empty if they were equal; None for a new run.
    """
    options = job.train
    replicas = network.share.parts
    check_batch(options.batch, replicas)
    batch = min(options.batch, len(splits.train))
    group = 0
    # A network without BatchNorm has no groups that a pass would have to hold whole.
    layers = any(isinstance(module, GroupedNorm) for module in network.model.modules())
    grouped = not own and normalises_in_groups(mode) and layers
    if isinstance(options.norm_group, int) and grouped:
        group = options.norm_group
    elif options.norm_group == "global" and grouped:
        group = batch
    why = _why_equal(job, mode, network, own=own)
    if why and replicas > 1 and job.cluster.shares not in {"equal", MACHINES}:
        hints = ("set --parallel data --sync allreduce", f"or {_EQUAL}")
        raise UserError(f"cluster.shares can't be used: {why}", _WHERE, hints)
    shares = () if why and job.cluster.shares == MACHINES else _shares(job, replicas, journal, kept)
    order = Order(len(splits.train), batch, options.seed, options.drop_last)
    sharing = BatchSharing(replicas, options.micro_batch, group, aligned=not network.share.together, shares=shares)
    within = sharing.within(most, batch)
    if within.micro_batch != sharing.micro_batch:
        journal.event("note", _passes_message(within, most, batch), 0)
    return order, within


def _passes_message(sharing: BatchSharing, most: int, batch: int) -> str:
    """Returns the message about micro-batches that are limited to the size at the start of the run."""
    passes, largest = len(sharing.micro_batches(batch)), sharing.largest_share(batch)
    more = f"with enough memory, add --set train.micro_batch={batch}"
    if largest <= most:
        limit = f"at most {most} samples, the limit from the start of the run ({more})"
        return f"each process computes an update in {passes} micro-batches of {limit}"
    groups = f"because train.norm_group is {sharing.group}"
    return f"micro-batches now have up to {largest} samples instead of {most}, {groups} ({more})"


def _shares(job: Job, replicas: int, journal: Journal, kept: list[int] | None) -> tuple[int, ...]:
    """Returns the shares in the job, for `replicas` processes; empty for equal shares."""
    shares = job.cluster.shares
    if isinstance(shares, str):
        fits = shares != "equal" and kept and len(kept) == replicas
        return tuple(kept or ()) if fits else ()
    if sum(shares) != job.train.batch:
        what = f"the sum of cluster.shares {list(shares)} is {sum(shares)}, but train.batch is {job.train.batch}"
        raise UserError(what, _WHERE, (f"set --batch {sum(shares)}", "or correct the shares", f"or {_EQUAL}"))
    if len(shares) == replicas:
        message = f"shares of the batch of {job.train.batch} samples, by process: {', '.join(map(str, shares))}"
        journal.event("shares", message, 0, shares=list(shares))
        return shares
    what = f"cluster.shares has {len(shares)} number(s) for {replicas} processes"
    if kept is None:
        raise UserError(what, _WHERE, ("write one number for each process", f"or {_EQUAL}"))
    journal.event("warning", f"{what}; using equal shares", 0)
    return ()


def _why_equal(job: Job, mode: str, network: ParallelNetwork, *, own: bool) -> str:
    """Returns why the mode or the sync method doesn't support the shares of the job; empty if it does."""
    if network.share.together:
        return f"--parallel {mode} splits each batch into equal parts"
    if job.cluster.shares in {"auto", MACHINES} and mode != USUAL_MODE:
        return f"with --parallel {mode}, each layer waits for all processes, so their speed can't be measured"
    if own:
        return f"--sync {job.sync.method} normalises each process's own samples, so shares would change the result"
    return ""


def previous_shares(found: Resumable | None) -> list[int] | None:
    """Returns the shares in the checkpoint, for `order_and_sharing`."""
    kept: Any = found.snapshot.state.get("shares", []) if found else None
    if kept is None:
        return None
    # Anything, if somebody else made the checkpoint.
    return kept if isinstance(kept, list) and all(type(one) is int and one > 0 for one in kept) else []


def kept_most(found: Resumable | None) -> int:
    """Returns the largest micro-batch recorded in the checkpoint."""
    return int(found.snapshot.state.get("most_in_a_pass", 0)) if found else 0


def refuse_small_micro_batches(order: Order, batch_sharing: BatchSharing, network: ParallelNetwork) -> None:
    """Raises UserError if a micro-batch has fewer samples than an op has shards, because ops fail on empty input."""
    parts, counts = network.share.most_parts, {min(order.batch, order.length)}
    if not order.drop_last:
        counts.add(order.length - (order.steps_per_epoch - 1) * order.batch)
    for count in counts:
        least = min(shares[-1].stop - shares[0].start for shares in batch_sharing.micro_batches(count))
        if least < parts:
            raise UserError(
                f"an op shards the batch over {parts} processes, but a micro-batch has only {least} sample(s)",
                "train.batch",
                (
                    f"change --batch: {order.length} samples in batches of {order.batch} leave a last batch of {least}",
                    "or drop the last batch: --train.drop-last",
                ),
            )
