"""Estimates the costs of sync methods: seconds and bytes per step. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from manyhands.core.options import Options, option
from manyhands.sync.link_speeds import LinkSpeed, link_seconds, rounds, sent_bytes, work_seconds

CodecName = Literal["none", "bf16", "int8", "int4", "lowrank"]

_STREAMS, _MEMORY_BYTES_PER_S = 3, 1e10  # a sum reads two vectors and writes one; memory bandwidth of an ordinary core


@dataclass(frozen=True)
class LinkCase:
    """The network, the link and the run for which costs are estimated."""

    shapes: tuple[tuple[int, ...], ...]  # of all trainable parameters
    item_bytes: int  # bytes of a parameter's value
    buffers: int  # number of values in the network's buffers (BatchNorm's statistics)
    machines: int  # machines that exchange over the link
    step_s: float  # seconds of one update without synchronization
    backward_s: float  # the seconds of `step_s` that overlap with sending gradients
    link: LinkSpeed  # between two machines
    steps: int  # updates of the entire run
    pass_s: float = 0.0  # seconds of one sum of two vectors of all values, the unit of compression work; 0: estimated
    idle_s: float = 0.0  # the seconds of `backward_s` in which the cores that compress are idle
    layers_s: float = 0.0  # seconds of the layers' collectives in every update (BatchNorm's sums)

    def compressing_s(self, passes: float) -> float:
        """Returns the seconds of a compression with `passes` passes over all values, or 0 if there is one machine."""
        if self.machines == 1:
            return 0.0
        return passes * (self.pass_s or _STREAMS * self.values * self.item_bytes / _MEMORY_BYTES_PER_S)

    @property
    def values(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Cost:
    """A variant of a sync method, with its estimated costs."""

    method: str  # the method's name
    step_s: float  # average seconds of an update, with synchronization
    sent_bytes: float  # bytes that each machine sends per update
    exchange_s: float = 0.0  # seconds of one exchange
    codec: CodecName = "none"  # of method `local`
    every: int = 1  # steps between exchanges
    delay: int = 0  # steps of training during an exchange
    refused: str = ""  # reason why it must not be chosen; empty: candidate


# Values that share a 16-bit scale (4 bits become 4.0625 bits per value), and the unit in which vectors are divided.
BLOCK, SCALE_BYTES = 256, 2
# Bits of a factor's value, and values that share a scale: few, because columns differ much in size.
FACTOR_BITS, FACTOR_BLOCK = 4, 32
FACTOR_VALUE_BYTES = FACTOR_BITS / 8 + SCALE_BYTES / FACTOR_BLOCK
# Smaller tensors are sent uncompressed, and factors have at least this many values: the latency dominates below.
_MIN_IN_MATRIX, _MIN_IN_FACTOR = 4096, 1536
# Gradients are sent in batches, each with this share of the remaining values, so that the last batch is small.
_SHARE, _MOST, _MIN_VALUES = 0.4, 0.25, 8192


@dataclass(frozen=True)
class Matrix:
    """A tensor of which one low-rank factor is sent in each turn."""

    place: int  # index of the tensor
    rows: int  # of the tensor as a matrix
    columns: int
    rank: int  # columns of its factors
    first: int  # the factor that is sent in turn 0: 0 the left one [rows, rank], 1 the right one [columns, rank]

    def length(self, turn: int) -> int:
        """Returns the number of rows of the factor that is sent in `turn`."""
        return self.columns if (self.first + turn) % 2 else self.rows


@dataclass(frozen=True)
class LowRankLayout:
    """How the tensors of a flat buffer are sent: as low-rank factors or uncompressed."""

    matrices: tuple[Matrix, ...]  # tensors that are sent as factors, one of the two in each turn
    dense: tuple[int, ...]  # indices of tensors that are sent uncompressed
    shapes: tuple[tuple[int, ...], ...]  # of all tensors

    def values(self, turn: int) -> int:
        """Returns the number of values that are sent in `turn`: a factor of each matrix, and uncompressed tensors."""
        thin = sum(matrix.rank * matrix.length(turn) for matrix in self.matrices)
        return thin + sum(math.prod(self.shapes[place]) for place in self.dense)


def low_rank_layout(shapes: Sequence[tuple[int, ...]], rank: int) -> LowRankLayout:
    """Selects the tensors to send as low-rank factors: those whose factors have at most half as many values.

    Reshapes each matrix to be nearly square, because its factors are shortest then. Left and right factors are sent in
    turn, with about equally many values in each turn. Small matrices get a rank above `rank`, at little cost.
    """
    found: list[tuple[int, int, int, int]] = []
    dense: list[int] = []
    for place, shape in enumerate(shapes):
        # A vector has no structure that factors could follow.
        rows, columns = _nearly_square(shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        most = rows * columns // (2 * (rows + columns)) if rows * columns >= _MIN_IN_MATRIX else 0
        if most < rank:
            dense.append(place)
        else:
            found.append((place, rows, columns, min(most, max(rank, 2 * _MIN_IN_FACTOR // (rows + columns)))))
    matrices: list[Matrix] = []
    ahead = 0  # values that even turns send more than odd turns
    for place, rows, columns, own in sorted(found, key=lambda matrix: -matrix[3] * abs(matrix[1] - matrix[2])):
        first = int((rows > columns) == (ahead > 0))
        ahead += own * (columns - rows if first else rows - columns)
        matrices.append(Matrix(place, rows, columns, own, first))
    return LowRankLayout(tuple(sorted(matrices, key=lambda matrix: matrix.place)), tuple(dense), tuple(shapes))


def _nearly_square(rows: int, columns: int) -> tuple[int, int]:
    while columns and columns % 2 == 0 and 4 * rows <= columns:
        rows, columns = 2 * rows, columns // 2
    while rows and rows % 2 == 0 and 4 * columns <= rows:
        rows, columns = rows // 2, 2 * columns
    return rows, columns


def divide_into_batches(shapes: Sequence[tuple[int, ...]], rank: int) -> list[list[int]]:
    """Divides tensors, with shapes in forward order, into batches to send. Returns their indices, last layers first."""
    ranks = low_rank_layout(shapes, rank)
    sent = {matrix.place: matrix.rank * (matrix.rows + matrix.columns) / 2 for matrix in ranks.matrices}
    sent |= {place: float(math.prod(shapes[place])) for place in ranks.dense}
    whole = sum(sent.values())
    left, found, gathered = whole, [list[int]()], 0.0
    for place in reversed(range(len(shapes))):
        found[-1].append(place)
        gathered += sent[place]
        if gathered >= max(min(_SHARE * left, _MOST * whole), _MIN_VALUES) and place:
            left, gathered = left - gathered, 0.0
            found.append([])
    return found


class RankOptions(Options):
    """Options of the low-rank approximation."""

    rank: int = option(
        4, "rank of the low-rank approximation; used only with method powersgd or codec lowrank", ge=1, le=128
    )


def values_per_machine(count: int, machines: int) -> int:
    """Returns the number of values that each machine averages for all: its share of `count`, rounded up to blocks."""
    return -(-count // (machines * BLOCK)) * BLOCK


def value_bytes(codec: str, item_bytes: int) -> float:
    """Returns the number of bytes that a codec sends per value. The codec "none" sends `item_bytes`."""
    return {"none": item_bytes, "bf16": 2, "int8": 1 + SCALE_BYTES / BLOCK, "int4": 0.5 + SCALE_BYTES / BLOCK}[codec]


def mean_bytes(count: int, machines: int, each_bytes: float) -> float:
    """Returns the bytes that a machine sends to average `count` values by an all-to-all and an all-gather."""
    return 2 * (machines - 1) * values_per_machine(count, machines) * each_bytes


_BUCKET_BYTES = 25 << 20  # of DDP; each bucket adds the latency
_STATISTIC_BYTES = 8
_CROSSING = 1.3  # slowdown if all send to all at once: 1.1 to 1.5 with gloo on three machines at 10 to 1000 Mbit/s
_CONTROL_BYTES = 220  # of gloo, to each peer in each collective; measured


@dataclass(frozen=True)
class MessageCost:
    """The cost of a message, or of several messages in sequence."""

    sent_bytes: float = 0.0  # bytes that each machine sends
    seconds: float = 0.0  # until all machines have received the message
    work_s: float = 0.0  # the part of `seconds` in which a machine's cores can't compute

    def __add__(self, other: "MessageCost") -> "MessageCost":
        return MessageCost(self.sent_bytes + other.sent_bytes, self.seconds + other.seconds, self.work_s + other.work_s)

    def exposed_seconds(self, hiding_s: float) -> float:
        """Returns the seconds that the message adds to a step if it overlaps `hiding_s` seconds of computation."""
        return self.work_s + max(0.0, self.seconds - self.work_s - hiding_s)


def gradient_cost(case: LinkCase, item_bytes: int) -> MessageCost:
    """Returns the cost of all-reducing all gradients between machines.

    The processes of a machine sum first (`modes.data.TwoLevelNetwork`). With bf16 and on accelerators, DDP sums over
    all processes instead, which sends 50 % more between two machines of two processes each.
    """
    return _all_reduce_cost(case, case.values * item_bytes, -(-case.values * case.item_bytes // _BUCKET_BYTES))


def statistics_cost(case: LinkCase) -> MessageCost:
    """Returns the cost of the all-reduce of BatchNorm's running statistics in each update."""
    return _all_reduce_cost(case, case.buffers * _STATISTIC_BYTES, 1)


def averaging_cost(case: LinkCase, count: int, each_bytes: float) -> MessageCost:
    """Returns the cost of averaging `count` values: an all-to-all, then an all-gather of the means."""
    if not count:
        return MessageCost()
    sent = mean_bytes(count, case.machines, each_bytes) + 2 * (case.machines - 1) * _CONTROL_BYTES
    messages = 2 * rounds("all_to_all", case.machines)[0]
    crossing = _CROSSING if case.machines > 2 else 1.0
    return MessageCost(sent, crossing * sent / case.link.bytes_per_s + messages * case.link.latency_s)


def low_rank_cost(case: LinkCase, shapes: Sequence[tuple[int, ...]], rank: int) -> MessageCost:
    """Returns the mean cost of averaging left and right factors, in turn, of tensors of the given shapes."""
    ranks = low_rank_layout(shapes, rank)
    both = [averaging_cost(case, ranks.values(turn), FACTOR_VALUE_BYTES) for turn in (0, 1)]
    return MessageCost(sum(one.sent_bytes for one in both) / 2, sum(one.seconds for one in both) / 2)


def _all_reduce_cost(case: LinkCase, size_bytes: float, calls: int) -> MessageCost:
    if not size_bytes:
        return MessageCost()
    parties, link = case.machines, case.link
    seconds = calls * link_seconds("all_reduce", parties, size_bytes / calls, link)
    work_s = calls * work_seconds("all_reduce", parties, size_bytes / calls, link)
    return MessageCost(sent_bytes("all_reduce", parties, size_bytes), seconds, work_s)
