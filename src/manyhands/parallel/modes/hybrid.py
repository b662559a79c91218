"""Hybrid: the network's author splits it by hand (parallel/grid.py); the mode sums gradients and nothing else.

Samples are shared over some axes of the mesh, by default all that cut no parameter. A parameter's gradient is summed
over those of them that don't cut it. Over the other axes a whole parameter's gradient is whole already, because the
author's `enter` has summed it there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.mesh import TensorLayout
from manyhands.core.needs import Need
from manyhands.core.seeds import mix
from manyhands.core.world import World
from manyhands.parallel.grid import Grid
from manyhands.parallel.marks import axis_numbers, layouts_of
from manyhands.parallel.network import MicroBatchShape, ModeRequest, ParallelNetwork
from manyhands.parallel.norm import GroupedNorm, NormGroups
from manyhands.parallel.on_mesh import NetworkOnMesh
from manyhands.parallel.plan import Plan
from manyhands.parallel.reduce import Reducer

DESCRIPTION = "the network's own code splits the network over the axes of a mesh"
NORM_GROUPS = True
OFFERS = frozenset[Need]()
TAKES_MESH = True


@dataclass
class HybridNetwork:
    """A network that its author has split."""

    model: nn.Module  # whose parameters are this process's pieces
    grid: Grid  # the processes
    layouts: dict[str, TensorLayout]  # of each parameter and buffer, by its name in the state dict
    samples: tuple[int, ...]  # numbers of the mesh's axes over which samples are shared
    reducer: Reducer  # sums gradients
    norms: NormGroups  # BatchNorm's groups; shared over the axes of the samples only

    def begin_micro_batch(self, shape: MicroBatchShape) -> None:
        """Describes the pass that comes next. Processes with the same samples draw alike, as in dropout."""
        place = self.grid.place(self.samples)
        self.grid.batch = shape.samples
        share = shape.share(self.grid.parts(self.samples), place)
        self.norms.begin_micro_batch(share.spans, share.shared_groups, share.count, shape.batch)
        torch.manual_seed(mix(mix(shape.seed) ^ place))

    def finish_update(self) -> None:
        """Moves BatchNorm's running statistics by what all samples showed."""
        self.norms.finish_update(self.grid.parts(self.samples))

    def on_mesh(self) -> NetworkOnMesh:
        """The network as training, evaluation and checkpoints take it."""
        return NetworkOnMesh(
            call=self.model,
            inner=self.model,
            no_sync=self.reducer.no_sync,
            collective_forward=True,
            grid=self.grid,
            reducer=self.reducer,
            layouts=self.layouts,
            input_axes=self.samples,
            loss_axes=self.samples,
            begin_micro_batch=self.begin_micro_batch,
            move_statistics=self.finish_update,
            plan=Plan(self.grid.mesh, layouts=self.layouts),
            most_parts=self.grid.parts(self.samples),
            whole_outputs=False,
        )


def apply(model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:  # noqa: ARG001 - the modes' contract
    """Has a network run that was constructed with `request.grid`. Raises UserError: none, or a mark doesn't fit it."""
    if request.grid is None:
        hints = ("give --mesh dp=2,tp=2 and a network whose __init__ takes `mesh`",)
        raise UserError("mode hybrid needs a network that was built with a mesh", "parallel.mesh", hints)
    return hybrid_network(model, request.grid, request.samples).on_mesh()


def hybrid_network(model: nn.Module, grid: Grid, samples: Sequence[str] | None = None) -> HybridNetwork:
    """Has a network run that was constructed with this grid and holds pieces; whole parameters are equal on all.

    `samples` names the axes over which samples are shared; None: all that cut no parameter. Raises UserError: a
    parameter's mark or an axis of `samples` doesn't fit the mesh.
    """
    layouts = layouts_of(model, grid.mesh, grid.world.rank)
    if samples is None:
        cut = {axis for layout in layouts.values() for axis in layout.sharded_axes}
        axes = tuple(axis for axis in range(len(grid.mesh.axes)) if axis not in cut)
    else:
        axes = axis_numbers(samples, grid.mesh, "parallel.samples")
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in layouts and isinstance(parameter, nn.Parameter):
            over = tuple(axis for axis in axes if axis not in layouts[name].sharded_axes)
            layouts[name] = replace(layouts[name], gradient_axes=over)
    reducer = Reducer(dict(model.named_parameters()), layouts, grid)
    return HybridNetwork(model, grid, layouts, axes, reducer, _share_norms(model, grid, axes))


def _share_norms(model: nn.Module, grid: Grid, samples: tuple[int, ...]) -> NormGroups:
    shared = grid.parts(samples) > 1
    groups = NormGroups(processes=grid.group(samples) if shared else None)
    for module in model.modules():
        if isinstance(module, GroupedNorm):
            module.groups = groups
            groups.layers.append(module)
    return groups
