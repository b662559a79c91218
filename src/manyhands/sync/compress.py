"""Ways of sending a vector: rounded value by value, or as matrices of low rank. Both hand back what they kept back.

The law of each: the mean of what went in (values and the residual before) is the average plus the mean of the
residuals now, so nothing is ever lost, only late.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from manyhands.core.seeds import mix
from manyhands.sync.codecs import Integers, codec_named
from manyhands.sync.products import PORTABLE, Arithmetic, fastest_alike, gram_schmidt, lengths_of, write_product
from manyhands.sync.shapes import FACTOR_BITS, FACTOR_BLOCK, Matrix, rank_shapes
from manyhands.sync.talk import ExchangeSteps, Residual, SyncGroup, mean_of


class Compressor(Protocol):
    """A way of agreeing on the mean of vectors [n]."""

    def average(self, values: Tensor, peers: SyncGroup) -> ExchangeSteps[tuple[Tensor, Tensor]]:
        """The agreed mean [n], and what of the values it lacks [n], in whose memory it may lie."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Tensors that the next exchange depends on, as they are between two exchanges."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes back what `state` gave."""
        ...


class Rounded:
    """Each value rounded by a codec, both on the way to who adds it up and on the way back."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._codec = codec_named(name, dtype)
        self._sums: Tensor | None = None

    def average(self, values: Tensor, peers: SyncGroup) -> ExchangeSteps[tuple[Tensor, Tensor]]:
        """See `Compressor`; what was kept back of the sums stays with whoever added them up."""
        averaged, residual = yield from mean_of(values, self._codec, peers, self._sums)
        self._sums = residual.sums
        return averaged, residual.own

    def state(self) -> dict[str, Tensor]:
        """What was kept back of this process's part of the sums."""
        return {} if self._sums is None else {"sums": self._sums}

    def load(self, state: dict[str, Tensor]) -> None:
        self._sums = state.get("sums")


class LowRank:
    """Each matrix as a product of two thin ones, of which one is known everywhere from the turn before.

    Left and right factors go in turns, so that two turns make one step of a power iteration, and each takes one
    exchange. Sources: Vogels, Karimireddy and Jaggi, "PowerSGD", 2019, arXiv:1905.13727; Zhang et al., "Evaluation and
    optimization of gradient compression for distributed deep learning" (ACP-SGD), 2023, arXiv:2306.08881. Factors
    travel as integers of 4 bits: what that loses is held back like the rest. A factor travels column by column, since
    those of one scale belong together.

    `rank` is the columns of the thin matrices, of small ones more; the seed of the first factors is equal everywhere.
    Of several vectors that are sent together not all had better send their longer factors at a time: `turn` is 0 or 1.
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
        # how factors are multiplied and made orthonormal, alike on all peers; see `compute_alike`
        self.arithmetic: Arithmetic = PORTABLE
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
        """What is to be sent of values [n]: this turn's factors, and the tensors that are no matrices."""
        self.prepare()
        pieces = values.split(self._sizes)
        thin = [
            known @ (matrix if self._sends_right(one) else matrix.T)
            for one, known, matrix in zip(self.ranks.matrices, self._known, self._matrices(pieces), strict=True)
        ]
        return torch.cat([tensor.reshape(-1) for tensor in (*thin, *(pieces[place] for place in self.ranks.rest))])

    def send(self, sent: Tensor, peers: SyncGroup) -> ExchangeSteps[tuple[Tensor, Residual]]:
        """The mean over all peers of what `begin` gave, and what rounding kept back of it; two messages."""
        return (yield from mean_of(sent, self._codec, peers))

    def end(
        self,
        values: Tensor,
        sent: Tensor,
        received: tuple[Tensor, Tensor],
        slots: Sequence[Tensor],
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Writes what was agreed on into `slots`, and leaves in the values of `begin` what was not sent of them.

        `received`: the mean of what all sent, and what rounding kept back of this process's part. `between` is called
        now and then, since this takes a while.
        """
        mean, lost = received
        pieces = values.split(self._sizes)
        averaged, own, unsent = self._unflat(mean), self._unflat(sent - lost), self._unflat(lost)
        for number, (one, matrix) in enumerate(zip(self.ranks.matrices, self._matrices(pieces), strict=True)):
            known = self._known[number]
            left, right = (known, averaged[number]) if self._sends_right(one) else (averaged[number], known)
            write_product(self.arithmetic.multiply, left, right, slots[one.place])
            between()
            # What its own factor lacks, not what the agreed one lacks: else each process's distance from the mean,
            # which nobody needs to know, would pile up in what it holds.
            left, right = (known, own[number]) if self._sends_right(one) else (own[number], known)
            matrix.addmm_(left.T, right, alpha=-1)
            between()
        for number, place in enumerate(self.ranks.rest, len(self.ranks.matrices)):
            slots[place].copy_(averaged[number].view(slots[place].shape))
            pieces[place].copy_(unsent[number])
        self._averaged, self._turn = averaged[: len(self._known)], self._turn + 1

    def prepare(self) -> None:
        """Makes the factors that all have just got ready for the next turn; `begin` does, if nobody has done so."""
        if self._averaged is not None:
            first = self._first[1 - self._turn % 2]
            self._known, self._averaged = self.arithmetic.orthonormal(self._averaged, first), None

    def state(self) -> dict[str, Tensor]:
        """The factors that are known, and whose turn it is."""
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


def compressor_named(
    name: str, shapes: list[tuple[int, ...]], *, rank: int, seed: int, device: str, dtype: torch.dtype
) -> Compressor:
    """The compressor that options call none, bf16, int8, int4 or lowrank, for tensors of these shapes in one vector."""
    return LowRank(shapes, rank, seed, device, dtype) if name == "lowrank" else Rounded(name, dtype)


def compute_alike(compressors: Sequence[Compressor], peers: SyncGroup, like: Tensor) -> None:
    """Has them compute as fast as all peers can to equal bits, on values like these; a collective."""
    thin = [one for one in compressors if isinstance(one, LowRank)]
    if thin:
        shapes = [(matrix.rows, matrix.columns, matrix.rank) for one in thin for matrix in one.ranks.matrices]
        arithmetic = fastest_alike(shapes, peers, like)
        for one in thin:
            one.arithmetic = arithmetic


def _random_columns(one: Matrix, turn: int, generator: torch.Generator) -> Tensor:
    """For the factor that goes in a turn, of length one: see `gram_schmidt`."""
    # Uniform numbers, which have the same bits on every processor; normal ones don't.
    columns = torch.rand(one.rank, one.length(turn), generator=generator) - 0.5
    return columns / lengths_of(columns)
