"""A network that runs under some parallel mode, as the training step sees it."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from manyhands.core.layouts import TensorLayout
from manyhands.core.mesh import Mesh
from manyhands.parallel.grid import Grid, convert
from manyhands.parallel.norm import SpanLike
from manyhands.parallel.placement import Extent, Layout
from manyhands.parallel.plan import Plan

NothingToHoldBack = contextlib.nullcontext

# Of a network's output and labels int64 [n]: the sum [] of losses, and the logits [n, C].
Criterion = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
# The same, and the labels that the logits belong to.
Judge = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]


class ShareLike(Protocol):
    """What one of several processes has of a pass, as data/order.py describes it."""

    @property
    def spans(self) -> tuple[SpanLike, ...]:
        """The parts of BatchNorm's groups that it holds."""
        ...

    @property
    def shared_groups(self) -> tuple[int, ...]:
        """Samples in each group that several hold."""
        ...

    @property
    def count(self) -> int:
        """Its samples."""
        ...


@dataclass(frozen=True)
class PassShape:
    """What a split network must know of a pass before it begins.

    Attributes:
        samples: in this pass, over all processes.
        batch: samples in the whole update.
        share: what process number `index` of `parts` has of the pass.
        seed: decides what its ops draw; equal on all processes.
    """

    samples: int
    batch: int
    share: Callable[[int, int], ShareLike]
    seed: int = 0


@dataclass(frozen=True)
class Cutting:
    """How a network's tensors and samples are cut over a mesh.

    Attributes:
        grid: the processes.
        layouts: of each entry of the state dict.
        input_axes: numbers of the axes along which processes are given different samples.
        loss_axes: numbers of the axes along which processes compute the loss of different samples.
        begin_pass: is told of each pass before it.
        finish_backward: waits for the gradients' sums, after an update's last backward pass.
        finish_update: moves BatchNorm's running statistics.
        judge: makes the criterion one for this network's outputs.
        release: gives process groups and hooks back.
        plan: what it was cut by.
        outputs: how many classes the network tells apart; 0 if unknown.
        most_parts: into how many parts some op shares out the samples.
        whole_outputs: in evaluation each process gets the outputs of all samples; False: of its own.
        draws: some op draws random numbers in training.
    """

    grid: Grid
    layouts: Mapping[str, TensorLayout]
    input_axes: tuple[int, ...]
    loss_axes: tuple[int, ...]
    begin_pass: Callable[[PassShape], None]
    finish_backward: Callable[[], None]
    finish_update: Callable[[], None]
    judge: Callable[[Criterion, float], Judge]
    release: Callable[[], None]
    plan: Plan
    outputs: int = 0
    most_parts: int = 1
    whole_outputs: bool = True
    draws: bool = False

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.grid.mesh

    @property
    def replicas(self) -> int:
        """How many processes are given different samples."""
        return self.grid.parts(self.input_axes)

    @property
    def replica(self) -> int:
        """This process's place among them."""
        return self.grid.place(self.input_axes)

    def gather_rows(self, rows: Tensor, count: int) -> Tensor:
        """All `count` samples' rows of which each replica gives its own; a collective. Sets the pass's samples."""
        self.grid.batch = count
        axes = range(len(self.mesh.axes))
        here: Layout = tuple(0 if axis in self.input_axes else "R" for axis in axes)
        return convert(rows, here, ("R",) * len(axes), Extent((count,), 1), self.grid)

    @property
    def counts(self) -> bool:
        """True on one of the processes that compute the loss of the same samples."""
        axes = range(len(self.mesh.axes))
        return self.grid.first([axis for axis in axes if axis not in self.loss_axes])


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


@dataclass
class ParallelNetwork:
    """What a mode's `apply` returns.

    Attributes:
        call: the module to call in training; its backward agrees on gradients where the mode does so.
        inner: the user's network under its own names, for evaluation and checkpoints.
        gradient_scale: what a process multiplies (its sum of losses / global batch) by, so that the gradients that
            come out are those of the mean loss over the global batch: the number of processes for modes that average.
        hold_back: a context in which backward adds up gradients without agreeing on them, for accumulation.
        collective_forward: True when every process must call forward equally often, also in evaluation.
        replicated: True when all processes hold equal parameters, so that they can be compared.
        sharded: True when parameters are held as torch's own distributed tensors.
        cutting: how it is cut, for modes that cut by a plan.
        reach_all: of the loss of an update's last pass, the same loss, whose backward comes to every parameter, also to
            those that this pass didn't use; for modes that wait for all.
        endless: names of buffers that held NaN or infinity from the start, and may.
    """

    call: nn.Module
    inner: nn.Module
    gradient_scale: float = 1.0
    hold_back: Callable[[], AbstractContextManager[object]] = field(default=NothingToHoldBack)
    collective_forward: bool = False
    replicated: bool = True
    sharded: bool = False
    cutting: Cutting | None = None
    reach_all: Callable[[Tensor], Tensor] = field(default=_as_it_is)
    endless: frozenset[str] = frozenset()

    def replicas(self, size: int) -> int:
        """How many of `size` processes are given different samples."""
        return self.cutting.replicas if self.cutting else size


@dataclass(frozen=True)
class How:
    """What a mode may need to know to apply itself.

    Attributes:
        unused: True when some parameters may get no gradient.
        plan: which part of each op's work each process does, for modes that follow one.
        picture: one sample, whose numbers don't matter, for modes that look into the network.
        cross_entropy: the loss is plain cross-entropy, whose classes can be cut.
        grid: what the network was constructed with, for networks that their author has split.
        samples: names of the mesh's axes over which samples are shared; None: all that cut no parameter.
        reduces: False where somebody else agrees on gradients, for the mode data.
        group: the processes that agree in each update, for the mode data; None: all.
        hook: what takes the place of a plain mean of gradients in DDP; None for that.
    """

    unused: bool = False
    cross_entropy: bool = True
    plan: Plan | None = None
    picture: Tensor = field(default_factory=lambda: torch.zeros(0))
    grid: Grid | None = None
    samples: tuple[str, ...] | None = None
    reduces: bool = True
    group: Any = None
    hook: Any = None
