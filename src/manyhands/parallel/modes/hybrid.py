"""Hybrid mode: the network shards itself, and the mode synchronizes gradients and BatchNorm statistics.

The gradient of a parameter is summed over the axes that shard the samples but not the parameter. Over other axes, the
network itself sums gradients of unsharded parameters: in the backward of `Axis.enter`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from typing_extensions import override

from manyhands.core.errors import UserError
from manyhands.core.mesh import TensorLayout
from manyhands.core.needs import Need
from manyhands.core.seeds import mix
from manyhands.core.world import World
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.mesh.marks import axis_indices, state_dict_layouts
from manyhands.parallel.network import MicroBatchShape, ModeRequest, NetworkTraits, ParallelNetwork
from manyhands.parallel.on_mesh import NetworkOnMesh
from manyhands.parallel.plan import Plan
from manyhands.parallel.replicas.batch_norm import GroupedNorm, NormGroups

NORM_GROUPS = True
OFFERS = frozenset[Need]()
TAKES_MESH = True


def apply(model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:  # noqa: ARG001 - as all modes
    if request.grid is None:
        hints = ("give --mesh dp=2,tp=2 and a network whose __init__ takes `mesh`",)
        raise UserError("mode hybrid needs a network that was built with a mesh", "parallel.mesh", hints)
    return hybrid_network(model, request.grid, request.samples)


class HybridNetwork(NetworkOnMesh):
    """A network that shards itself. `samples` are the indices of the mesh axes that shard the samples."""

    def __init__(
        self, model: nn.Module, grid: Grid, layouts: dict[str, TensorLayout], samples: tuple[int, ...]
    ) -> None:
        self.samples, parts = samples, grid.parts(samples)
        # BatchNorm's groups are shared over the axes of the samples only.
        groups = NormGroups(processes=grid.group(samples) if parts > 1 else None)
        for module in model.modules():
            if isinstance(module, GroupedNorm):
                module.groups = groups
                groups.layers.append(module)
        traits = NetworkTraits(plan=Plan(grid.mesh, layouts=layouts))
        super().__init__(model, model, grid, layouts, (samples, samples), most_parts=parts, traits=traits)
        self.norms = groups

    @override
    def begin_micro_batch(self, shape: MicroBatchShape) -> None:
        """Sets BatchNorm's groups of samples, and seeds torch. Processes with the same samples get the same seed."""
        self.grid.batch = shape.samples
        share = shape.share(self.share.parts, self.share.index)
        self.norms.begin_micro_batch(share.spans, share.shared_groups, share.count, shape.batch)
        torch.manual_seed(mix(mix(shape.seed) ^ self.share.index))


def hybrid_network(model: nn.Module, grid: Grid, samples: Sequence[str] | None = None) -> HybridNetwork:
    """Wraps a network that was constructed with `grid`. Unsharded parameters must be equal on all processes.

    `samples` names axes that shard the samples; None: all that shard no parameter. Raises UserError for wrong shards.
    """
    layouts = state_dict_layouts(model, grid.mesh, grid.world.rank)
    if samples is None:
        cut = {axis for layout in layouts.values() for axis in layout.sharded_axes}
        axes = tuple(axis for axis in range(len(grid.mesh.axes)) if axis not in cut)
    else:
        axes = axis_indices(samples, grid.mesh, "parallel.samples")
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in layouts and isinstance(parameter, nn.Parameter):
            over = tuple(axis for axis in axes if axis not in layouts[name].sharded_axes)
            layouts[name] = replace(layouts[name], gradient_axes=over)
    return HybridNetwork(model, grid, layouts, axes)
