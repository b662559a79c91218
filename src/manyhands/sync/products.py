"""Products of thin factors, whose bits must be equal on all machines, or their networks would drift apart.

A matrix product is fastest, and for few columns most libraries add up in one order; where a machine doesn't, all
multiply term by term instead.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from manyhands.sync.talk import Peers

Multiply = Callable[[Tensor, Tensor, Tensor], object]


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


def write_product(multiply: Multiply, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Multiplies into a tensor of n x m values, whatever its type and memory format."""
    shape = (left.shape[1], right.shape[1])
    if out.is_contiguous() and out.dtype == left.dtype:
        multiply(left, right, out.view(shape))
    else:
        whole = left.new_empty(shape)
        multiply(left, right, whole)
        out.copy_(whole.view(out.shape))


def fastest_alike(shapes: Iterable[tuple[int, int, int]], peers: Peers, like: Tensor) -> Multiply:
    """The fastest way to multiply that gives all peers equal bits; a collective.

    Args:
        shapes: rows and columns of the matrices to come, and columns of their factors.
        peers: who must have equal bits.
        like: of the device and type of the factors.
    """
    if peers.size == 1:
        return at_once
    generator, seen = torch.Generator().manual_seed(0), 0
    for rows, columns, rank in sorted(set(shapes)):
        left, right = (_random(rank, n, generator).to(like.dtype).to(like.device) for n in (rows, columns))
        out = left.new_empty(rows, columns)
        at_once(left, right, out)
        # Of the bits, in wrapping arithmetic.
        seen = seen * 31 + int(out.cpu().view(torch.int32).sum(dtype=torch.int64))
    mine = torch.tensor([seen % (1 << 62)], device=like.device).view(torch.uint8)
    theirs, work = peers.gather(mine)
    work.wait()
    return at_once if bool((theirs == mine).all()) else term_by_term


def _random(rank: int, length: int, generator: torch.Generator) -> Tensor:
    """Equal bits on every processor, which normal numbers aren't; with as many digits as any type holds."""
    return torch.rand(rank, length, generator=generator, dtype=torch.float64) - 0.5
