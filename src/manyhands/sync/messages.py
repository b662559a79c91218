"""Seconds and bytes of the messages that sync methods send, as the methods' estimates add them up."""

from dataclasses import dataclass

from manyhands.sync.codecs import Codec, Integers, mean_bytes
from manyhands.sync.costs import FACTOR_BITS, FACTOR_BLOCK, LinkCase, Ranks, batches, rank_shapes
from manyhands.sync.link_speeds import link_seconds, rounds, sent_bytes, work_seconds

# torch's DDP sends gradients in buckets of about this size, each of which waits for its own first byte.
_BUCKET_BYTES = 25 << 20
_STATISTIC_BYTES = 8
# Where all send to all at once, streams meet at a receiver: 1.1 to 1.5 times the bytes' own time was measured with gloo
# between three machines at 10, 100 and 1000 Mbit/s.
_CROSSING = 1.3
# What gloo sends beside the values, to each peer in each collective: measured between three machines.
_CONTROL_BYTES = 220


@dataclass(frozen=True)
class SyncMessage:
    """A message of a machine, or several in sequence."""

    sent_bytes: float = 0.0  # by each machine
    seconds: float = 0.0  # until all have it
    work_s: float = 0.0  # of these, those in which a machine's cores can't compute

    def __add__(self, other: "SyncMessage") -> "SyncMessage":
        return SyncMessage(self.sent_bytes + other.sent_bytes, self.seconds + other.seconds, self.work_s + other.work_s)

    def beside(self, hiding_s: float) -> float:
        """Seconds by which a step becomes longer, if `hiding_s` of its computation overlap."""
        return self.work_s + max(0.0, self.seconds - self.work_s - hiding_s)


def gradients(case: LinkCase, item_bytes: int) -> SyncMessage:
    """DDP's all-reduces of all gradients.

    Machines are the parties, since their processes add up first (`modes.data.TwoLevelNetwork`). With bf16 and on
    accelerators DDP alone does it, and sends half as much again between two machines with two processes each.
    """
    whole = case.values * item_bytes
    buckets = -(-case.values * case.item_bytes // _BUCKET_BYTES)
    return _all_reduce(case, whole, buckets)


def statistics(case: LinkCase) -> SyncMessage:
    """One all-reduce of BatchNorm's running statistics per update."""
    return _all_reduce(case, case.buffers * _STATISTIC_BYTES, 1)


def mean(case: LinkCase, count: int, codec: Codec) -> SyncMessage:
    """The mean of `count` values: parts to their owners, then each owner's mean to all."""
    if not count:
        return SyncMessage()
    sent = mean_bytes(count, case.machines, codec) + 2 * (case.machines - 1) * _CONTROL_BYTES
    messages = 2 * rounds("all_to_all", case.machines)[0]
    crossing = _CROSSING if case.machines > 2 else 1.0
    return SyncMessage(sent, crossing * sent / case.link.bytes_per_s + messages * case.link.latency_s)


def low_rank(case: LinkCase, rank: int) -> SyncMessage:
    """One thin factor of each matrix, as the mean of two turns."""
    return _turns(case, rank_shapes(case.shapes, rank))


def low_rank_batches(case: LinkCase, rank: int) -> list[SyncMessage]:
    """The same in batches, as they leave during a backward pass."""
    places = batches(case.shapes, rank)
    return [_turns(case, rank_shapes([case.shapes[place] for place in batch], rank)) for batch in places]


def _turns(case: LinkCase, ranks: Ranks) -> SyncMessage:
    both = [mean(case, ranks.values(turn), Integers(FACTOR_BITS, FACTOR_BLOCK)) for turn in (0, 1)]
    return SyncMessage(sum(one.sent_bytes for one in both) / 2, sum(one.seconds for one in both) / 2)


def _all_reduce(case: LinkCase, size_bytes: float, calls: int) -> SyncMessage:
    if not size_bytes:
        return SyncMessage()
    parties, link = case.machines, case.link
    seconds = calls * link_seconds("all_reduce", parties, size_bytes / calls, link)
    work_s = calls * work_seconds("all_reduce", parties, size_bytes / calls, link)
    return SyncMessage(sent_bytes("all_reduce", parties, size_bytes), seconds, work_s)
