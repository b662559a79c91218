"""Compressors of exchanged vectors. They round values or approximate matrices, and return the error as a residual.

The mean of the inputs (values plus earlier residuals) equals the returned mean plus the mean of the new residuals, so
no value is lost, only delayed. Low-rank factors must be bitwise equal on all machines, or the replicas would diverge.
Library functions are fastest, but bitwise equal only on machines of one kind. Otherwise, portable functions are used.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.seeds import mix
from manyhands.sync.costs import FACTOR_BITS, FACTOR_BLOCK, Matrix, low_rank_layout
from manyhands.sync.exchange import ExchangeSteps, IntegerCodec, Residual, SyncGroup, average_vector, create_codec

Multiply = Callable[[Tensor, Tensor, Tensor], object]

_EXPLAINED = 1e-6  # a unit column whose remainder is at most this long depends on earlier columns


@dataclass(frozen=True)
class Arithmetic:
    """A set of functions that compute low-rank factors and their products."""

    multiply: Multiply  # (left [r, n], right [r, m], out [n, m]): writes left.T @ right
    # (factors [r, n], replacements of zero columns) -> orthonormal columns; see `gram_schmidt`
    orthonormal: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def library_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Writes left.T @ right to `out` [n, m], for left [r, n] and right [r, m]. Rounding depends on the machine."""
    torch.mm(left.T, right, out=out)


def portable_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Writes left.T @ right to `out`, bitwise equal on all machines: fixed order of sums, no fused multiply-add."""
    torch.mul(left[0][:, None], right[0], out=out)
    for one, other in zip(left[1:], right[1:], strict=True):
        out.add_(one[:, None] * other)


def householder(factors: Sequence[Tensor], replacements: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormalizes the columns of each factor by Householder reflections. Arguments are as in `gram_schmidt`."""
    pairs = zip(factors, replacements, strict=True)
    live = [torch.where(factor.any(1, keepdim=True), factor, one) for factor, one in pairs]
    return [torch.linalg.qr(_on_capable_device(factor).T).Q.T.contiguous().to(factor.device) for factor in live]


def gram_schmidt(factors: Sequence[Tensor], replacements: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormalizes the r columns of each factor [r, n]. A column that depends linearly on earlier ones becomes zero.

    First replaces columns of zeros, which would stay zero, by those of `replacements` [r, n]. Sums are computed in
    double precision, then rounded, so that they are bitwise equal on all machines.
    """
    found: list[Tensor] = []
    for factor, one in zip(factors, replacements, strict=True):
        lengths = column_norms(factor)
        live = lengths > 0
        whole = torch.where(live, factor / torch.where(live, lengths, 1), one)
        for number in range(len(whole)):
            column, later = whole[number : number + 1], whole[number + 1 :]
            length = column_norms(column)
            column.copy_(torch.where(length <= _EXPLAINED, 0.0, column / length))
            products = column * later
            total = _on_capable_device(products).sum(-1, keepdim=True, dtype=torch.float64)
            later.sub_(_rounded(total, products) * column)
        found.append(whole)
    return found


LIBRARY, PORTABLE = Arithmetic(library_product, householder), Arithmetic(portable_product, gram_schmidt)


def write_product(multiply: Multiply, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Writes left.T @ right to `out`, a tensor of n x m values with any shape, dtype and memory format."""
    shape = (left.shape[1], right.shape[1])
    if out.is_contiguous() and out.dtype == left.dtype:
        multiply(left, right, out.view(shape))
    else:
        whole = left.new_empty(shape)
        multiply(left, right, whole)
        out.copy_(whole.view(out.shape))


def column_norms(columns: Tensor) -> Tensor:
    """Returns the 2-norms of vectors [..., n] as [..., 1], bitwise equal on all machines."""
    # Square roots differ between processors, as sums do, until they are rounded.
    return _rounded(_on_capable_device(columns * columns).sum(-1, keepdim=True, dtype=torch.float64).sqrt(), columns)


def _on_capable_device(values: Tensor) -> Tensor:
    return values if values.device.type in {"cpu", "cuda"} else values.cpu()


def _rounded(exact: Tensor, like: Tensor) -> Tensor:
    """Rounds to single precision, so that all machines agree. Returns a tensor with device and dtype of `like`."""
    return exact.to(torch.float32).to(like.device, like.dtype)


class RoundingCompressor:
    """A compressor that rounds each value with a codec, before and after averaging."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._codec = create_codec(name, dtype)
        self._sums: Tensor | None = None

    def average(self, values: Tensor, peers: SyncGroup) -> ExchangeSteps[tuple[Tensor, Tensor]]:
        """Returns (mean over peers [n], residual of `values` [n]). Rounding errors of the means stay in this object."""
        averaged, residual = yield from average_vector(values, self._codec, peers, self._sums)
        self._sums = residual.sums
        return averaged, residual.own

    def state(self) -> dict[str, Tensor]:
        """Returns the rounding errors of the means that this process computes for all peers."""
        return {} if self._sums is None else {"sums": self._sums}

    def load(self, state: dict[str, Tensor]) -> None:
        self._sums = state.get("sums")


class LowRank:
    """Compresses each matrix to a product of two thin factors, and sends one of the two in each exchange ("turn").

    All processes know the other factor from the previous turn. Left and right factors alternate, so two turns make one
    step of a power iteration. Sources: Vogels, Karimireddy and Jaggi, "PowerSGD", 2019, arXiv:1905.13727; Zhang et al.,
    "Evaluation and optimization of gradient compression for distributed deep learning" (ACP-SGD), 2023,
    arXiv:2306.08881. Factors are sent column by column as 4-bit integers, whose rounding errors stay in the residual.

    Factors have `rank` columns, or more for small matrices. `seed` must be equal on all processes. `turn` (0 or 1) is
    the number of the first turn. It should alternate between vectors that are sent together, so that not all of them
    send their longer factor at once.
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
        self.arithmetic: Arithmetic = PORTABLE  # equal on all peers; see `select_arithmetic`
        self.ranks = low_rank_layout(shapes, rank)  # how the tensors are sent
        self._sizes = [int(torch.Size(shape).numel()) for shape in shapes]
        self._codec = IntegerCodec(FACTOR_BITS, FACTOR_BLOCK)
        generator = torch.Generator().manual_seed(mix(seed))
        # Factors [n, rank] are stored as columns [rank, n]. For even and odd turns, columns that replace zeros.
        self._first = [
            [_random_columns(one, turn, generator).to(device, dtype) for one in self.ranks.matrices] for turn in (0, 1)
        ]
        self._turn = turn
        self._averaged: list[Tensor] | None = None  # the factors of this turn, until `prepare`
        # The factors of the turn before, known on all peers, as orthonormal columns.
        self._known = gram_schmidt(self._first[1 - turn], self._first[1 - turn])

    def average(self, values: Tensor, peers: SyncGroup) -> ExchangeSteps[tuple[Tensor, Tensor]]:
        sent = self.begin(values)
        mean, residual = yield from self.send(sent, peers)
        averaged = torch.empty_like(values)
        shapes = self.ranks.shapes
        slots = [piece.view(shape) for piece, shape in zip(averaged.split(self._sizes), shapes, strict=True)]
        self.end(values, sent, (mean, residual.combined(peers)), slots)
        return averaged, values

    def begin(self, values: Tensor) -> Tensor:
        """Returns the vector to send for `values` [n]: the factors of this turn, then the uncompressed tensors."""
        self.prepare()
        pieces = values.split(self._sizes)
        thin = [
            known @ (matrix if self._sends_right_factor(one) else matrix.T)
            for one, known, matrix in zip(self.ranks.matrices, self._known, self._matrices(pieces), strict=True)
        ]
        return torch.cat([tensor.reshape(-1) for tensor in (*thin, *(pieces[place] for place in self.ranks.dense))])

    def send(self, sent: Tensor, peers: SyncGroup) -> ExchangeSteps[tuple[Tensor, Residual]]:
        """Averages `sent`, the result of `begin`, over all peers in two collectives. Returns (mean, residual)."""
        return (yield from average_vector(sent, self._codec, peers))

    def end(
        self,
        values: Tensor,
        sent: Tensor,
        received: tuple[Tensor, Tensor],
        slots: Sequence[Tensor],
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Writes the averaged tensors to `slots`, and the residual to `values`, the argument of `begin`.

        `received`: (mean of `sent` over all peers, rounding error of this process). Calls `between` after each product.
        """
        mean, lost = received
        pieces = values.split(self._sizes)
        averaged, own, unsent = self._unflatten(mean), self._unflatten(sent - lost), self._unflatten(lost)
        for number, (one, matrix) in enumerate(zip(self.ranks.matrices, self._matrices(pieces), strict=True)):
            known = self._known[number]
            left, right = (known, averaged[number]) if self._sends_right_factor(one) else (averaged[number], known)
            write_product(self.arithmetic.multiply, left, right, slots[one.place])
            between()
            # Not relative to the mean of all factors: the distance from the mean would accumulate.
            left, right = (known, own[number]) if self._sends_right_factor(one) else (own[number], known)
            matrix.addmm_(left.T, right, alpha=-1)
            between()
        for number, place in enumerate(self.ranks.dense, len(self.ranks.matrices)):
            slots[place].copy_(averaged[number].view(slots[place].shape))
            pieces[place].copy_(unsent[number])
        self._averaged, self._turn = averaged[: len(self._known)], self._turn + 1

    def prepare(self) -> None:
        """Orthonormalizes the received factors for the next turn. `begin` calls this if nobody has."""
        if self._averaged is not None:
            first = self._first[1 - self._turn % 2]
            self._known, self._averaged = self.arithmetic.orthonormal(self._averaged, first), None

    def state(self) -> dict[str, Tensor]:
        """Returns the factors of the previous turn, which are equal on all processes, and the number of the turn."""
        self.prepare()
        known = {f"known.{number}": factor for number, factor in enumerate(self._known)}
        return {"turn": torch.tensor(self._turn), **known}

    def load(self, state: dict[str, Tensor]) -> None:
        self._turn, self._averaged = int(state["turn"]), None
        self._known = [state[f"known.{number}"] for number in range(len(self._known))]

    def _sends_right_factor(self, one: Matrix) -> bool:
        return bool((one.first + self._turn) % 2)

    def _matrices(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [pieces[one.place].view(one.rows, one.columns) for one in self.ranks.matrices]

    def _unflatten(self, sent: Tensor) -> list[Tensor]:
        lengths = [one.length(self._turn) for one in self.ranks.matrices]
        thin = [length * one.rank for length, one in zip(lengths, self.ranks.matrices, strict=True)]
        pieces = sent.split([*thin, *(self._sizes[place] for place in self.ranks.dense)])
        shaped = [piece.view(-1, length) for piece, length in zip(pieces, lengths, strict=False)]
        return [*shaped, *pieces[len(shaped) :]]


Compressor = RoundingCompressor | LowRank


def create_compressor(
    name: str, shapes: list[tuple[int, ...]], *, rank: int, seed: int, device: str, dtype: torch.dtype
) -> Compressor:
    """Creates the compressor `name` (none, bf16, int8, int4 or lowrank) of a vector of tensors with these shapes."""
    return LowRank(shapes, rank, seed, device, dtype) if name == "lowrank" else RoundingCompressor(name, dtype)


def select_arithmetic(compressors: Sequence[Compressor], peers: SyncGroup, like: Tensor) -> None:
    """Selects the fastest functions that are bitwise equal on all peers, for tensors like `like`. A collective."""
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
            library_product(left, right, out)
            for found in (out, *householder([left, right], [left, right])):
                bits.update(found.cpu().view(torch.uint8).numpy().tobytes())
        theirs, work = peers.gather(torch.tensor(list(bits.digest()), dtype=torch.uint8, device=like.device))
        work.wait()
        if not bool((theirs == theirs[peers.rank]).all()):
            arithmetic = PORTABLE
    for one in thin:
        one.arithmetic = arithmetic


def _random_columns(one: Matrix, turn: int, generator: torch.Generator) -> Tensor:
    """Returns random columns of norm 1, which replace zero columns of the factor of a turn in `gram_schmidt`."""
    columns = torch.rand(one.rank, one.length(turn), generator=generator) - 0.5  # uniform, as in `select_arithmetic`
    return columns / column_norms(columns)
