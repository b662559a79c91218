"""Arithmetic on thin factors, whose bits must be equal on all machines, or their networks would drift apart.

Libraries are fastest, and on machines of one kind they give equal bits; where they don't, all compute step by step.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.sync.talk import SyncGroup

Multiply = Callable[[Tensor, Tensor, Tensor], object]

# What is left of a column of length one that the ones before it explain, but for rounding.
_EXPLAINED = 1e-6


@dataclass(frozen=True)
class Arithmetic:
    """How factors are computed with."""

    multiply: Multiply  # columns [r, n] times columns [r, m], into [n, m]
    # factors as columns [r, n], and what may replace a column that has come to nothing, to orthonormal columns that
    # span those of each factor; see `gram_schmidt`
    orthonormal: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def at_once(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Columns [r, n] times columns [r, m], into out [n, m]; the order of the terms is the library's."""
    torch.mm(left.T, right, out=out)


def term_by_term(left: Tensor, right: Tensor, out: Tensor) -> None:
    """The same in the order of the columns, to the same bits on every machine.

    Products are rounded before they are added: some processors would round but once for both, and others can't.
    """
    torch.mul(left[0][:, None], right[0], out=out)
    for one, other in zip(left[1:], right[1:], strict=True):
        out.add_(one[:, None] * other)


def by_reflections(factors: Sequence[Tensor], first: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal columns by Householder's reflections; for a column that the earlier ones explain, some other one."""
    live = [torch.where(factor.any(1, keepdim=True), factor, one) for factor, one in zip(factors, first, strict=True)]
    return [torch.linalg.qr(_where_known(factor).T).Q.T.contiguous().to(factor.device) for factor in live]


def gram_schmidt(factors: Sequence[Tensor], first: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal columns [r, n] that span those of each factor; zeros for a column that the earlier ones explain.

    A column that has come to nothing is replaced by that of `first`, or it would stay so for good: a matrix that has
    moved in fewer than r directions, or not at all yet, leaves such columns.

    Sums are taken in double precision and rounded: machines of different kinds add up in different orders, and all must
    come to the same bits.
    """
    return [_gram_schmidt(factor, one) for factor, one in zip(factors, first, strict=True)]


def _gram_schmidt(factor: Tensor, first: Tensor) -> Tensor:
    lengths = lengths_of(factor)
    live = lengths > 0
    whole = torch.where(live, factor / torch.where(live, lengths, 1), first)
    for number in range(len(whole)):
        column, later = whole[number : number + 1], whole[number + 1 :]
        length = lengths_of(column)
        column.copy_(torch.where(length <= _EXPLAINED, 0.0, column / length))
        later.sub_(_sum(column * later) * column)
    return whole


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


def fastest_alike(shapes: Iterable[tuple[int, int, int]], peers: SyncGroup, like: Tensor) -> Arithmetic:
    """The fastest arithmetic that gives all peers equal bits, on the device and in the type of `like`; a collective.

    Shapes are rows and columns of the matrices to come, and columns of their factors.
    """
    if peers.size == 1:
        return LIBRARY
    generator, bits = torch.Generator().manual_seed(0), hashlib.sha256()
    for rows, columns, rank in sorted(set(shapes)):
        left, right = (_random(rank, n, generator).to(like.dtype).to(like.device) for n in (rows, columns))
        out = left.new_empty(rows, columns)
        at_once(left, right, out)
        for found in (out, *by_reflections([left, right], [left, right])):
            bits.update(found.cpu().view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(list(bits.digest()), dtype=torch.uint8, device=like.device)
    theirs, work = peers.gather(mine)
    work.wait()
    return LIBRARY if bool((theirs == mine).all()) else PORTABLE


def _random(rank: int, length: int, generator: torch.Generator) -> Tensor:
    """Equal bits on every processor, which normal numbers aren't; with as many digits as any type holds."""
    return torch.rand(rank, length, generator=generator, dtype=torch.float64) - 0.5


def _sum(products: Tensor) -> Tensor:
    return _rounded(_where_known(products).sum(-1, keepdim=True, dtype=torch.float64), products)


def lengths_of(columns: Tensor) -> Tensor:
    """Of vectors [..., n], as [..., 1]; to the same bits on every machine."""
    # Roots are no more equal on all processors than sums are.
    return _rounded(_where_known(columns * columns).sum(-1, keepdim=True, dtype=torch.float64).sqrt(), columns)


def _where_known(values: Tensor) -> Tensor:
    """Where double precision and reflections are known, which they aren't on every kind of device."""
    return values if values.device.type in {"cpu", "cuda"} else values.cpu()


def _rounded(exact: Tensor, like: Tensor) -> Tensor:
    """To single precision, whatever the type: that is what makes the bits equal."""
    return exact.to(torch.float32).to(like.device, like.dtype)
