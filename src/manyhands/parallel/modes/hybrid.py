"""Hybrid: the network's author splits it by hand (parallel/hybrid.py); the mode sums gradients and nothing else.

Samples are shared over some axes of the mesh, by default all that cut no parameter. A parameter's gradient is summed
over those of them that don't cut it. Over the other axes a whole parameter's gradient is whole already, because the
author's `enter` has summed it there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.errors import UserError
from manyhands.core.layouts import TensorLayout
from manyhands.core.seeds import mix
from manyhands.core.world import World
from manyhands.parallel.grid import Grid
from manyhands.parallel.marks import axis_numbers, layouts_of
from manyhands.parallel.network import Criterion, Cutting, How, Judge, ParallelNetwork, PassShape
from manyhands.parallel.norm import GroupedNorm, NormGroups
from manyhands.parallel.plan import Plan
from manyhands.parallel.reduce import Reducer, total_norm

DESCRIPTION = "you split the network by hand over the axes of a mesh"
NORM_GROUPS = True


@dataclass
class HybridNetwork:
    """A network that its author has split.

    Attributes:
        model: whose parameters are this process's pieces.
        grid: the processes.
        layouts: of each parameter and buffer, by its name in the state dict.
        samples: numbers of the mesh's axes over which samples are shared.
        reducer: sums gradients.
        norms: BatchNorm's groups; shared over the axes of the samples only.
    """

    model: nn.Module
    grid: Grid
    layouts: dict[str, TensorLayout]
    samples: tuple[int, ...]
    reducer: Reducer
    norms: NormGroups

    def begin_pass(self, shape: PassShape) -> None:
        """Describes the pass that comes next. Processes with the same samples draw alike, as in dropout."""
        place = self.grid.place(self.samples)
        self.grid.batch = shape.samples
        share = shape.share(self.grid.parts(self.samples), place)
        self.norms.begin_pass(share.spans, share.shared_groups, share.count, shape.batch)
        torch.manual_seed(mix(mix(shape.seed) ^ place))

    def finish_update(self) -> None:
        """Moves BatchNorm's running statistics by what all samples showed."""
        self.norms.finish_update(self.grid.parts(self.samples))

    def total_norm(self) -> Tensor:
        """The norm [] of all gradients of the whole network."""
        return total_norm(dict(self.model.named_parameters()), self.layouts, self.grid)

    def release(self) -> None:
        """Gives process groups and hooks back."""
        self.reducer.release()
        self.grid.release()

    def cutting(self) -> Cutting:
        """What the training step and checkpoints must know of it."""
        return Cutting(
            grid=self.grid,
            layouts=self.layouts,
            input_axes=self.samples,
            loss_axes=self.samples,
            begin_pass=self.begin_pass,
            finish_backward=self.reducer.finish,
            finish_update=self.finish_update,
            judge=_judge,
            release=self.release,
            plan=Plan(self.grid.mesh, layouts=self.layouts),
            most_parts=self.grid.parts(self.samples),
            whole_outputs=False,
        )


def apply(model: nn.Module, world: World, how: How) -> ParallelNetwork:  # noqa: ARG001 - the modes' contract
    """Has a network run that was constructed with `how.grid`.

    Raises:
        UserError: there is no grid, or a mark doesn't fit its mesh.
    """
    if how.grid is None:
        mend = ("--mesh dp=2,tp=2", "and a network whose __init__ takes `mesh`")
        raise UserError("hybrid needs a mesh that the network was made with", "parallel.mesh", mend)
    network = hybrid_network(model, how.grid, how.samples)
    return ParallelNetwork(
        call=model,
        inner=model,
        hold_back=network.reducer.hold_back,
        collective_forward=True,
        cutting=network.cutting(),
    )


def _judge(criterion: Criterion, smoothing: float) -> Judge:  # noqa: ARG001 - of cut classes, which the author puts together
    def judge(output: Any, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss, logits = criterion(output, labels)
        return loss, logits, labels

    return judge


def hybrid_network(model: nn.Module, grid: Grid, samples: Sequence[str] | None = None) -> HybridNetwork:
    """Has a network run that holds pieces of its parameters already.

    Args:
        model: constructed with this grid; whole parameters are equal on all processes.
        grid: the mesh at work.
        samples: names of the axes over which samples are shared; None: all that cut no parameter.

    Raises:
        UserError: a parameter's mark or an axis of `samples` doesn't fit the mesh.
    """
    layouts = layouts_of(model, grid.mesh, grid.world.rank)
    if samples is None:
        cut = {axis for layout in layouts.values() for axis in layout.cut_axes}
        axes = tuple(axis for axis in range(len(grid.mesh.axes)) if axis not in cut)
    else:
        axes = axis_numbers(samples, grid.mesh, "parallel.samples")
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in layouts and isinstance(parameter, nn.Parameter):
            over = tuple(axis for axis in axes if axis not in layouts[name].cut_axes)
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
