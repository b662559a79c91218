"""Compression of vectors: rounded value by value, or as low-rank matrices. Both return a residual.

The mean of the inputs (values plus earlier residuals) is the average plus the mean of the new residuals, so nothing is
lost, only late. The bits of factors must be equal on all machines, or their networks would drift apart. Libraries are
fastest and give equal bits on machines of one kind; elsewhere, all processes compute step by step.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.seeds import mix
from manyhands.sync.codecs import Integers, codec_named
from manyhands.sync.costs import FACTOR_BITS, FACTOR_BLOCK, Matrix, rank_shapes
from manyhands.sync.exchange import ExchangeSteps, Residual, SyncGroup, mean_of

Multiply = Callable[[Tensor, Tensor, Tensor], object]

_EXPLAINED = 1e-6  # rounding error of a column of length one that the earlier ones explain


@dataclass(frozen=True)
class Arithmetic:
    """How factors are computed."""

    multiply: Multiply  # columns [r, n] times columns [r, m], into [n, m]
    # factors as columns [r, n], and replacements of zero columns, to orthonormal columns; see `gram_schmidt`
    orthonormal: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def at_once(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Columns [r, n] times columns [r, m], into out [n, m]; the order of the terms is the library's."""
    torch.mm(left.T, right, out=out)


def term_by_term(left: Tensor, right: Tensor, out: Tensor) -> None:
    """The same in the order of the columns, to the same bits on every machine.

    Products are rounded before they are added: fused multiply-add isn't available everywhere.
    """
    torch.mul(left[0][:, None], right[0], out=out)
    for one, other in zip(left[1:], right[1:], strict=True):
        out.add_(one[:, None] * other)


def by_reflections(factors: Sequence[Tensor], first: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal columns by Householder's reflections."""
    live = [torch.where(factor.any(1, keepdim=True), factor, one) for factor, one in zip(factors, first, strict=True)]
    return [torch.linalg.qr(_where_known(factor).T).Q.T.contiguous().to(factor.device) for factor in live]


def gram_schmidt(factors: Sequence[Tensor], first: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal columns [r, n] that span those of each factor; zeros for a column that the earlier ones explain.

    A zero column is replaced by that of `first`, or it would stay zero: a matrix that has moved in fewer than r
    directions leaves such columns. Sums are taken in double precision and rounded, so that all machines get the same
    bits.
    """
    found: list[Tensor] = []
    for factor, one in zip(factors, first, strict=True):
        lengths = lengths_of(factor)
        live = lengths > 0
        whole = torch.where(live, factor / torch.where(live, lengths, 1), one)
        for number in range(len(whole)):
            column, later = whole[number : number + 1], whole[number + 1 :]
            length = lengths_of(column)
            column.copy_(torch.where(length <= _EXPLAINED, 0.0, column / length))
            products = column * later
            total = _where_known(products).sum(-1, keepdim=True, dtype=torch.float64)
            later.sub_(_rounded(total, products) * column)
        found.append(whole)
    return found


LIBRARY, PORTABLE = Arithmetic(at_once, by_reflections), Arithmetic(term_by_term, gram_schmidt)


def write_product(multiply: Multiply, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Multiplies into a tensor of n x m values, whatever its type and memory format."""
    shape = (left.shape[1], right.shape[1])
    if out.is_contiguous() and out.dtype == left.dtype:
        multiply(left, right, out.view(shape))
    else:
        whole = left.new_empty(shape)
        multiply(left, right, whole)
        out.copy_(whole.view(out.shape))


def lengths_of(columns: Tensor) -> Tensor:
    """Lengths of vectors [..., n], as [..., 1]; to the same bits on every machine."""
    # Roots are no more equal on all processors than sums are.
    return _rounded(_where_known(columns * columns).sum(-1, keepdim=True, dtype=torch.float64).sqrt(), columns)


def _where_known(values: Tensor) -> Tensor:
    """On a device with double precision and reflections."""
    return values if values.device.type in {"cpu", "cuda"} else values.cpu()


def _rounded(exact: Tensor, like: Tensor) -> Tensor:
    """To single precision, whatever the type: that is what makes the bits equal."""
    return exact.to(torch.float32).to(like.device, like.dtype)


class Rounded:
    """Rounds each value by a codec, before the sum and after it."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._codec = codec_named(name, dtype)
        self._sums: Tensor | None = None

    def average(self, values: Tensor, peers: SyncGroup) -> ExchangeSteps[tuple[Tensor, Tensor]]:
        """Exchanges vectors [n]: returns the mean [n] and the residual [n]; that of the sums stays on this process."""
        averaged, residual = yield from mean_of(values, self._codec, peers, self._sums)
        self._sums = residual.sums
        return averaged, residual.own

    def state(self) -> dict[str, Tensor]:
        """Returns the residual of this process's part of the sums."""
        return {} if self._sums is None else {"sums": self._sums}

    def load(self, state: dict[str, Tensor]) -> None:
        self._sums = state.get("sums")


class LowRank:
    """Sends each matrix as a product of two thin ones, of which one is known everywhere from the turn before.

    Left and right factors take turns, so that two turns make one step of a power iteration, and each takes one
    exchange. Sources: Vogels, Karimireddy and Jaggi, "PowerSGD", 2019, arXiv:1905.13727; Zhang et al., "Evaluation and
    optimization of gradient compression for distributed deep learning" (ACP-SGD), 2023, arXiv:2306.08881. Factors
    travel column by column as integers of 4 bits, whose rounding errors stay in the residual.

    `rank` is the columns of the thin matrices, more for small ones; `seed`, of the first factors, is equal everywhere.
    `turn` (0 or 1) alternates which of several vectors that are sent together send their longer factors.
    """

    def __init__(
        self,
        shapes: list[tuple[int, ...]],
        rank: int,
        seed: int,
        device: str,
        dtype: torch.dtype = torch.float32,
        *,
        turn: int = 0,
    ) -> None:
        self.arithmetic: Arithmetic = PORTABLE  # alike on all peers; see `compute_alike`
        self.ranks = rank_shapes(shapes, rank)  # how the tensors are sent
        self._sizes = [int(torch.Size(shape).numel()) for shape in shapes]
        self._codec = Integers(FACTOR_BITS, FACTOR_BLOCK)
        generator = torch.Generator().manual_seed(mix(seed))
        # Columns, here and below: [rank, n] for a factor of [n, rank]; for both kinds of turns, see `gram_schmidt`.
        self._first = [
            [_random_columns(one, turn, generator).to(device, dtype) for one in self.ranks.matrices] for turn in (0, 1)
        ]
        self._turn = turn
        self._averaged: list[Tensor] | None = None  # those of this turn, until they are made ready for the next
        # The factors that are known, those of the turn before, as orthonormal columns.
        self._known = gram_schmidt(self._first[1 - turn], self._first[1 - turn])

    def average(self, values: Tensor, peers: SyncGroup) -> ExchangeSteps[tuple[Tensor, Tensor]]:
        sent = self.begin(values)
        mean, residual = yield from self.send(sent, peers)
        averaged = torch.empty_like(values)
        shapes = self.ranks.shapes
        slots = [piece.view(shape) for piece, shape in zip(averaged.split(self._sizes), shapes, strict=True)]
        self.end(values, sent, (mean, residual.together(peers)), slots)
        return averaged, values

    def begin(self, values: Tensor) -> Tensor:
        """The values to send for values [n]: this turn's factors, and the tensors that are no matrices."""
        self.prepare()
        pieces = values.split(self._sizes)
        thin = [
            known @ (matrix if self._sends_right(one) else matrix.T)
            for one, known, matrix in zip(self.ranks.matrices, self._known, self._matrices(pieces), strict=True)
        ]
        return torch.cat([tensor.reshape(-1) for tensor in (*thin, *(pieces[place] for place in self.ranks.rest))])

    def send(self, sent: Tensor, peers: SyncGroup) -> ExchangeSteps[tuple[Tensor, Residual]]:
        """The mean over all peers of the result of `begin`, and its residual; two messages."""
        return (yield from mean_of(sent, self._codec, peers))

    def end(
        self,
        values: Tensor,
        sent: Tensor,
        received: tuple[Tensor, Tensor],
        slots: Sequence[Tensor],
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Writes the averaged tensors into `slots`, and leaves the residual in the values of `begin`.

        `received`: the mean of what all sent, and the rounding error of this process's part. `between` is called now
        and then, since this takes a while.
        """
        mean, lost = received
        pieces = values.split(self._sizes)
        averaged, own, unsent = self._unflat(mean), self._unflat(sent - lost), self._unflat(lost)
        for number, (one, matrix) in enumerate(zip(self.ranks.matrices, self._matrices(pieces), strict=True)):
            known = self._known[number]
            left, right = (known, averaged[number]) if self._sends_right(one) else (averaged[number], known)
            write_product(self.arithmetic.multiply, left, right, slots[one.place])
            between()
            # What its own factor lacks, not what the mean lacks: else the distance from the mean would accumulate.
            left, right = (known, own[number]) if self._sends_right(one) else (own[number], known)
            matrix.addmm_(left.T, right, alpha=-1)
            between()
        for number, place in enumerate(self.ranks.rest, len(self.ranks.matrices)):
            slots[place].copy_(averaged[number].view(slots[place].shape))
            pieces[place].copy_(unsent[number])
        self._averaged, self._turn = averaged[: len(self._known)], self._turn + 1

    def prepare(self) -> None:
        """Makes the received factors orthonormal for the next turn; `begin` does, if it hasn't been done."""
        if self._averaged is not None:
            first = self._first[1 - self._turn % 2]
            self._known, self._averaged = self.arithmetic.orthonormal(self._averaged, first), None

    def state(self) -> dict[str, Tensor]:
        """The known factors, and the turn."""
        self.prepare()
        known = {f"known.{number}": factor for number, factor in enumerate(self._known)}
        return {"turn": torch.tensor(self._turn), **known}

    def load(self, state: dict[str, Tensor]) -> None:
        self._turn, self._averaged = int(state["turn"]), None
        self._known = [state[f"known.{number}"] for number in range(len(self._known))]

    def _sends_right(self, one: Matrix) -> bool:
        return bool((one.first + self._turn) % 2)

    def _matrices(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [pieces[one.place].view(one.rows, one.columns) for one in self.ranks.matrices]

    def _unflat(self, sent: Tensor) -> list[Tensor]:
        lengths = [one.length(self._turn) for one in self.ranks.matrices]
        thin = [length * one.rank for length, one in zip(lengths, self.ranks.matrices, strict=True)]
        pieces = sent.split([*thin, *(self._sizes[place] for place in self.ranks.rest)])
        shaped = [piece.view(-1, length) for piece, length in zip(pieces, lengths, strict=False)]
        return [*shaped, *pieces[len(shaped) :]]


Compressor = Rounded | LowRank


def compressor_named(
    name: str, shapes: list[tuple[int, ...]], *, rank: int, seed: int, device: str, dtype: torch.dtype
) -> Compressor:
    """The compressor none, bf16, int8, int4 or lowrank of the options, for tensors of these shapes in one vector."""
    return LowRank(shapes, rank, seed, device, dtype) if name == "lowrank" else Rounded(name, dtype)


def compute_alike(compressors: Sequence[Compressor], peers: SyncGroup, like: Tensor) -> None:
    """Selects the fastest arithmetic with equal bits on all peers, for values like these; a collective."""
    thin = [one for one in compressors if isinstance(one, LowRank)]
    if not thin:
        return
    arithmetic = LIBRARY
    if peers.size > 1:
        generator, bits = torch.Generator().manual_seed(0), hashlib.sha256()
        shapes = {(matrix.rows, matrix.columns, matrix.rank) for one in thin for matrix in one.ranks.matrices}
        for rows, columns, rank in sorted(shapes):
            # Uniform numbers have equal bits on every processor, unlike normal ones.
            numbers = (torch.rand(rank, n, generator=generator, dtype=torch.float64) - 0.5 for n in (rows, columns))
            left, right = (one.to(like.dtype).to(like.device) for one in numbers)
            out = left.new_empty(rows, columns)
            at_once(left, right, out)
            for found in (out, *by_reflections([left, right], [left, right])):
                bits.update(found.cpu().view(torch.uint8).numpy().tobytes())
        theirs, work = peers.gather(torch.tensor(list(bits.digest()), dtype=torch.uint8, device=like.device))
        work.wait()
        if not bool((theirs == theirs[peers.rank]).all()):
            arithmetic = PORTABLE
    for one in thin:
        one.arithmetic = arithmetic


def _random_columns(one: Matrix, turn: int, generator: torch.Generator) -> Tensor:
    """Columns of length one for the factor of a turn; see `gram_schmidt`."""
    # Uniform numbers, which have the same bits on every processor; normal ones don't.
    columns = torch.rand(one.rank, one.length(turn), generator=generator) - 0.5
    return columns / lengths_of(columns)
