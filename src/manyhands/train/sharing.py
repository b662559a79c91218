"""How each update's samples are shared among the processes of a run."""

from typing import Any

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.journal import Journal
from manyhands.core.world import World
from manyhands.data.order import BatchSharing, Order
from manyhands.data.splits import Splits
from manyhands.parallel.apply import normalises_in_groups
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.norm import GroupedNorm
from manyhands.parallel.options import USUAL_MODE
from manyhands.train.recover import Resumable

# The default: speeds are measured where machines of several kinds take part.
MACHINES = "machines"
_WHERE, _EQUAL = "cluster.shares", "--set cluster.shares=equal"


def order_and_cut(  # noqa: PLR0913 - what a batch meets before it is shared out
    job: Job,
    splits: Splits,
    world: World,
    mode: str,
    network: ParallelNetwork,
    journal: Journal,
    kept: list[int] | None,
    *,
    own: bool = False,
    most: int = 0,
) -> tuple[Order, BatchSharing]:
    """Which samples make up an update, and how processes share them.

    Args:
        job: says how many.
        splits: the data.
        world: who takes part.
        mode: the parallel mode in force.
        network: under it.
        journal: told of shares that aren't equal.
        own: each process trains by itself, so that BatchNorm's groups are its own.
        most: samples that a process took in one pass when the run began; 0 where that isn't known.
        kept: shares of the checkpoint that the run goes on from, none where they were equal; None for a fresh start.
    """
    options = job.train
    sharing = network.replicas(world.size)
    if options.batch < sharing:
        raise UserError(
            f"train.batch is {options.batch}, and there are {sharing} processes to share it",
            "train.batch",
            (f"--batch {sharing} or more", "or fewer processes"),
        )
    batch = min(options.batch, len(splits.train))
    group = 0
    # A network without BatchNorm has no groups that a pass would have to hold whole.
    layers = any(isinstance(module, GroupedNorm) for module in network.inner.modules())
    grouped = not own and normalises_in_groups(mode) and layers
    if isinstance(options.norm_group, int) and grouped:
        group = options.norm_group
    elif options.norm_group == "global" and grouped:
        group = batch
    why = _why_equal(job, mode, network, own=own)
    if why and sharing > 1 and job.cluster.shares not in {"equal", MACHINES}:
        mend = ("--parallel data --sync allreduce", f"or {_EQUAL}")
        raise UserError(f"cluster.shares can't be kept: {why}", _WHERE, mend)
    shares = () if why and job.cluster.shares == MACHINES else _shares(job, sharing, journal, kept)
    order = Order(len(splits.train), batch, options.seed, options.drop_last)
    cut = BatchSharing(sharing, options.micro_batch, group, aligned=not network.together, shares=shares)
    within = cut.within(most, batch)
    if within.micro_batch != cut.micro_batch:
        journal.event("note", _told_of_passes(within, most, batch), 0)
    return order, within


def _told_of_passes(cut: BatchSharing, most: int, batch: int) -> str:
    """What is said where passes are made smaller, so that they fit where they did when the run began."""
    passes, largest = len(cut.micro_batches(batch)), cut.largest_share(batch)
    more = f"where there is memory for more: --set train.micro_batch={batch}"
    if largest <= most:
        return f"no process takes more than {most} samples in one pass, as when the run began: {passes} passes ({more})"
    groups = f"BatchNorm takes {cut.group} together, train.norm_group"
    return f"a process takes {largest} samples in one pass, and took {most} when the run began ({groups}; {more})"


def _shares(job: Job, sharing: int, journal: Journal, kept: list[int] | None) -> tuple[int, ...]:
    """What the job says of each process's samples, for so many processes; empty where they share equally."""
    shares = job.cluster.shares
    if isinstance(shares, str):
        fits = shares != "equal" and kept and len(kept) == sharing
        return tuple(kept or ()) if fits else ()
    if sum(shares) != job.train.batch:
        what = f"cluster.shares {list(shares)} add up to {sum(shares)}, and train.batch is {job.train.batch}"
        raise UserError(what, _WHERE, (f"--batch {sum(shares)}", "or other shares", f"or {_EQUAL}"))
    if len(shares) == sharing:
        told = f"of each update's {job.train.batch} samples the processes take {', '.join(map(str, shares))}"
        journal.event("shares", told, 0, shares=list(shares))
        return shares
    what = f"cluster.shares are of {len(shares)} process(es), and there are {sharing}"
    if kept is None:
        raise UserError(what, _WHERE, ("one number for each process", f"or {_EQUAL}"))
    journal.event("warning", f"{what}, which share equally", 0)
    return ()


def _why_equal(job: Job, mode: str, network: ParallelNetwork, *, own: bool) -> str:
    """Why the mode or the sync method can't share unequally as the job says; empty where it can."""
    if network.together:
        return f"under {mode} processes compute each batch together, in equal parts"
    if job.cluster.shares in {"auto", MACHINES} and mode != USUAL_MODE:
        return f"under {mode} each process waits for the others in its passes, so that its own speed can't be measured"
    if own:
        return f"with {job.sync.method} each process normalises its own samples, so other shares train another network"
    return ""


def kept_shares(found: Resumable | None) -> list[int] | None:
    """What `order_and_cut` asks for of the checkpoint that a run goes on from."""
    kept: Any = found.snapshot.state.get("shares", []) if found else None
    if kept is None:
        return None
    # Anything, if somebody else made the checkpoint.
    return kept if isinstance(kept, list) and all(type(one) is int and one > 0 for one in kept) else []


def kept_most(found: Resumable | None) -> int:
    """The same of the samples that a process took in one pass."""
    return int(found.snapshot.state.get("most_in_a_pass", 0)) if found else 0


def refuse_small_micro_batches(order: Order, batch_sharing: BatchSharing, network: ParallelNetwork) -> None:
    """Raises UserError where a pass has fewer samples than some op shares out: not all ops know what nothing is."""
    parts, counts = network.most_parts, {min(order.batch, order.length)}
    if not order.drop_last:
        counts.add(order.length - (order.steps_per_epoch - 1) * order.batch)
    for count in counts:
        least = min(shares[-1].stop - shares[0].start for shares in batch_sharing.micro_batches(count))
        if least < parts:
            raise UserError(
                f"a pass of {least} sample(s) can't be shared out among {parts} processes, as some op does",
                "train.batch",
                (
                    f"another --batch: {order.length} samples in batches of {order.batch} end with one of {least}",
                    "or leave that one out: --train.drop-last",
                ),
            )
