"""Conversions between layouts on real processes: what is a tensor stays that tensor, its gradient its gradient."""

import random

import pytest
import torch
import torch.distributed as dist

from manyhands.core.mesh import Mesh
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.mesh.placement import (
    Extent,
    conversion_steps,
    convert,
    convert_with_grad,
    gradient_layout,
    value_layout,
)
from tests.processes.ranks import run_on_ranks

MESHES = [(("dp", 4),), (("dp", 3), ("tp", 2)), (("dp", 2), ("one", 1), ("tp", 2))]
TRIALS = 25


def _drawn(chance, axes, words="RP"):
    """A layout; with B, one side of a conversion that has a gradient."""
    return tuple(chance.choice([0, 1, 2, *words]) for _ in range(axes))


def _whole(seed, extent, batch):
    shape = (batch * extent.rows, *extent.dims[1:]) if extent.rows else extent.dims
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _piece(tensor, layout, extent, grid):
    for dim in range(tensor.ndim):
        axes = [axis for axis, here in enumerate(layout) if here == dim]
        edges = extent.edges(dim, grid.parts(axes), grid.batch)
        place = grid.place(axes)
        tensor = tensor.narrow(dim, edges[place], edges[place + 1] - edges[place])
    return tensor.contiguous()


def _laid_out(tensor, layout, extent, grid, seed):
    """This process's piece of a whole tensor under a layout; terms of sums are random but for the last."""
    sums = [axis for axis, here in enumerate(layout) if here == "P"]
    terms = [_whole(seed + 1 + number, extent, grid.batch) for number in range(grid.parts(sums) - 1)]
    terms.append(tensor - sum(terms, torch.zeros_like(tensor)))
    return _piece(terms[grid.place(sums)], layout, extent, grid)


def _extent(chance, batch):
    rows = chance.choice([0, 1, 2])
    return Extent((batch * rows or 5, chance.choice([7, 3]), 6), rows)


def _round_trips(world, axes):
    grid, chance = Grid(Mesh(axes), world), random.Random(1)
    wholes = ("R",) * len(axes)
    for trial in range(TRIALS):
        grid.batch = chance.choice([5, 8, 1])
        source, target, extent = _drawn(chance, len(axes)), _drawn(chance, len(axes)), _extent(chance, grid.batch)
        tensor = _whole(trial, extent, grid.batch)
        here = _laid_out(tensor, source, extent, grid, 1000 * trial)
        kept = here.clone()
        there = convert(here, source, target, extent, grid)
        assert torch.equal(here, kept), (source, target)
        sums = tuple("R" if one == "P" else one for one in target)
        torch.testing.assert_close(
            convert(there, target, sums, extent, grid), _piece(tensor, sums, extent, grid), msg=f"{source} {target}"
        )
        torch.testing.assert_close(convert(there, target, wholes, extent, grid), tensor, msg=f"{source} {target}")
    grid.release()


def _products(world, axes):
    """<A x, y> = <x, A^T y>, where a pair of value and gradient gives a number: the sum of products over processes.

    A whole value goes with a term of a gradient or a term with a whole one; two whole ones count once for all copies.
    """
    grid, chance = Grid(Mesh(axes), world), random.Random(3)
    for trial in range(TRIALS):
        grid.batch = chance.choice([5, 8])
        extent = _extent(chance, grid.batch)
        before, after = _drawn(chance, len(axes), "RBP"), _drawn(chance, len(axes), "RBP")
        values, gradients = (
            (value_layout(before), value_layout(after)),
            (gradient_layout(before), gradient_layout(after)),
        )
        x, y = _whole(2 * trial, extent, grid.batch), _whole(2 * trial + 1, extent, grid.batch)
        piece = _laid_out(x, values[0], extent, grid, 1000 * trial).requires_grad_()
        result = convert_with_grad(piece, values, gradients, extent, grid)
        incoming = _laid_out(y, gradients[1], extent, grid, 1000 * trial + 500)
        (back,) = torch.autograd.grad(result, piece, incoming)
        left = _product(result.detach(), incoming, after, grid)
        right = _product(piece.detach(), back, before, grid)
        torch.testing.assert_close(left, (x * y).sum(), msg=f"{before} {after}")
        torch.testing.assert_close(right, left, msg=f"{before} {after}")
    grid.release()


def _product(value, gradient, sides, grid):
    copies = [axis for axis, side in enumerate(sides) if side == "R"]
    product = (value * gradient).sum() * (1.0 if grid.first(copies) else 0.0)
    dist.all_reduce(product)
    return product


def _all(world, axes):
    """What is a tensor stays that tensor; backward is the adjoint."""
    _round_trips(world, axes)
    _products(world, axes)
    if axes == MESHES[0]:  # nothing happens where nothing changes
        grid, tensor = Grid(Mesh(axes), world), torch.randn(2, 6)
        grid.batch = 4
        assert conversion_steps((0,), (0,)) == []
        assert convert(tensor, (0,), (0,), Extent((4, 6), 1), grid) is tensor
        grid.release()


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_conversions_keep_tensors_and_have_the_adjoint_as_backward(axes):
    run_on_ranks(_all, Mesh(axes).size, axes)
