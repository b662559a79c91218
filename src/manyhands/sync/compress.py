"""Ways of sending a vector: rounded value by value, or as matrices of low rank. Both hand back what they kept back.

The law of each: the mean of what went in (values and what was held before) is what was agreed on plus the mean of what
is held now, so nothing is ever lost, only late.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.core.seeds import mix
from manyhands.sync.codecs import Integers, codec_named
from manyhands.sync.shapes import FACTOR_BITS, rank_shapes
from manyhands.sync.talk import Conversation, Peers, mean_of


class Compressor(Protocol):
    """A way of agreeing on the mean of vectors [n]."""

    def agree(self, values: Tensor, peers: Peers) -> Conversation[tuple[Tensor, Tensor]]:
        """The agreed mean [n], and what of the values it lacks [n], in whose memory it may lie."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Tensors that the next exchange depends on, as they are between two exchanges."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes back what `state` gave."""
        ...


class Rounded:
    """Each value rounded, both on the way to who adds it up and on the way back.

    Args:
        name: none, bf16, int8 or int4.
        dtype: of the values.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._codec = codec_named(name, dtype)
        self._sums: Tensor | None = None

    def agree(self, values: Tensor, peers: Peers) -> Conversation[tuple[Tensor, Tensor]]:
        """See `Compressor`; what was kept back of the sums stays with whoever added them up."""
        agreed, held = yield from mean_of(values, self._codec, peers, self._sums)
        self._sums = held.sums
        return agreed, held.own

    def state(self) -> dict[str, Tensor]:
        """What was kept back of this process's part of the sums."""
        return {} if self._sums is None else {"sums": self._sums}

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes it back."""
        self._sums = state.get("sums")


class LowRank:
    """Each matrix as a product of two thin ones, by one step of a power iteration from the last exchange's.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD", 2019, arXiv:1905.13727. The left factors and all tensors that
    are no matrices go first, then the right factors, as integers of 8 bits: what that loses is held back like the
    rest. A factor travels column by column, since those of one scale belong together.

    Args:
        shapes: of the tensors that make up the vector, in order.
        rank: columns of the thin matrices.
        seed: of the first right factors; equal everywhere.
        device: where the tensors lie.
        dtype: of the values.
    """

    def __init__(
        self, shapes: list[tuple[int, ...]], rank: int, seed: int, device: str, dtype: torch.dtype = torch.float32
    ) -> None:
        self._ranks = rank_shapes(shapes, rank)
        self._sizes = [int(torch.Size(shape).numel()) for shape in shapes]
        self._codec = Integers(FACTOR_BITS)
        generator = torch.Generator().manual_seed(mix(seed))
        # Columns, here and below: [rank, n] for a factor of [n, rank].
        self._first = [
            torch.randn(rank, columns, generator=generator).to(device, dtype) for _, _, columns in self._ranks.matrices
        ]
        self._rights = self._first

    def agree(self, values: Tensor, peers: Peers) -> Conversation[tuple[Tensor, Tensor]]:
        """See `Compressor`."""
        pieces = values.split(self._sizes)
        matrices = [pieces[place].view(rows, columns) for place, rows, columns in self._ranks.matrices]
        starts = [_directions(*both) for both in zip(self._rights, self._first, strict=True)]
        lefts = [start @ matrix.T for matrix, start in zip(matrices, starts, strict=True)]
        plain = [pieces[place] for place in self._ranks.rest]
        first, held = yield from mean_of(_flat([*lefts, *plain], values), self._codec, peers)
        _, unsent = _unflat(held.together(peers), lefts, plain)
        lefts, plain = _unflat(first, lefts, plain)
        lefts = [orthonormal(left) for left in lefts]
        rights = [left @ matrix for matrix, left in zip(matrices, lefts, strict=True)]
        second, held = yield from mean_of(_flat(rights, values), self._codec, peers)
        own, _ = _unflat(_flat(rights, values) - held.together(peers), rights, [])
        self._rights, _ = _unflat(second, rights, [])
        agreed = torch.empty_like(values)
        slots = agreed.split(self._sizes)
        for (place, rows, columns), left, right in zip(self._ranks.matrices, lefts, self._rights, strict=True):
            product(left, right, out=slots[place].view(rows, columns))
        for place, piece, kept in zip(self._ranks.rest, plain, unsent, strict=True):
            slots[place].copy_(piece)
            pieces[place].copy_(kept)
        # What its own factors lack, not what the agreed ones lack: else each process's distance from the mean, which
        # nobody needs to know, would pile up in what it holds.
        for matrix, left, right in zip(matrices, lefts, own, strict=True):
            matrix.addmm_(left.T, right, alpha=-1)
        return agreed, values

    def state(self) -> dict[str, Tensor]:
        """The right factors."""
        return {f"right.{number}": right for number, right in enumerate(self._rights)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes them back."""
        self._rights = [state[f"right.{number}"] for number in range(len(self._rights))]


def compressor_named(
    name: str, shapes: list[tuple[int, ...]], *, rank: int, seed: int, device: str, dtype: torch.dtype
) -> Compressor:
    """The compressor that options call none, bf16, int8, int4 or lowrank.

    Args:
        name: which.
        shapes: of the tensors that make up the vector, in order.
        rank: of low-rank factors.
        seed: equal everywhere.
        device: where the vector lies.
        dtype: of the vector.
    """
    return LowRank(shapes, rank, seed, device, dtype) if name == "lowrank" else Rounded(name, dtype)


def _directions(right: Tensor, first: Tensor) -> Tensor:
    """Right columns [r, n] of length one; the first ones in place of those that have come to nothing, which would stay.

    A matrix that has moved in fewer than r directions, or not at all yet, leaves such columns.
    """
    lengths = right.norm(dim=1, keepdim=True)
    live = lengths > 0
    return torch.where(live, right / torch.where(live, lengths, 1), first / first.norm(dim=1, keepdim=True))


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns [r, n] that span those of a matrix; zeros for a column that the earlier ones explain.

    Gram-Schmidt in double precision, rounded to single precision: machines of different kinds add up in different
    orders, and all must come to the same bits. On the processor, since not every device has double precision.
    """
    done: list[Tensor] = []
    for column in columns.cpu().double():
        length = column.norm()
        for other in done:
            column = column - (other * column).sum().float().double() * other
        rest = column.norm().float().double()
        done.append(column / rest if rest > 1e-6 * length else torch.zeros_like(column))
    return torch.stack(done).to(torch.float32).to(columns.device, columns.dtype)


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Columns [r, n] times columns [r, m], into out [n, m]; term by term, so that all machines get equal bits."""
    torch.mul(left[0][:, None], right[0], out=out)
    for one, other in zip(left[1:], right[1:], strict=True):
        out.addr_(one, other)


def _flat(tensors: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like[:0]


def _unflat(flat: Tensor, first: list[Tensor], second: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    both = [*first, *second]
    pieces: Any = flat.split([tensor.numel() for tensor in both])
    shaped = [piece.view(tensor.shape) for piece, tensor in zip(pieces, both, strict=True)]
    return shaped[: len(first)], shaped[len(first) :]
