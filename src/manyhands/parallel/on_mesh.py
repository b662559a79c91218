"""Networks whose processes compute each micro-batch together on a mesh, and the network that follows a plan."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from manyhands.core.errors import UserError
from manyhands.core.mesh import TensorLayout
from manyhands.core.world import World
from manyhands.parallel.execute import SplitNetwork, batch_axes
from manyhands.parallel.graph import INPUT, LOSS, Graph, Loop
from manyhands.parallel.grid import Grid
from manyhands.parallel.network import (
    DataShare,
    Layouts,
    LossFn,
    LossFnWithLabels,
    MicroBatch,
    MicroBatchShape,
    ModeRequest,
    ModeTraits,
    ParallelNetwork,
)
from manyhands.parallel.norm import group_batch_norms
from manyhands.parallel.placement import Extent, Layout, convert, gather_full
from manyhands.parallel.plan import Plan
from manyhands.parallel.reduce import Reducer, total_norm
from manyhands.parallel.sharded_loss import WHOLE_CLASSES, SplitLoss, describe_loss
from manyhands.parallel.strategy import resolve
from manyhands.parallel.tracing import describe_network
from manyhands.parallel.weights import cut_alike


class NetworkOnMesh(ParallelNetwork):
    """A network whose processes compute each micro-batch together.

    Args:
        model: the user's network.
        call: the module to call in training and evaluation.
        grid: the processes.
        layouts: the layout of each parameter and buffer.
        axes: the mesh axes, by index, along which processes get different samples, and those along which they compute
            the loss of different samples.
        most_parts: the most parts into which an op shards the samples.
        traits: properties under the mode.
    """

    full_outputs = False  # True if evaluation returns the outputs of all samples on each process

    def __init__(
        self,
        model: nn.Module,
        call: nn.Module,
        grid: Grid,
        layouts: Mapping[str, TensorLayout],
        axes: tuple[tuple[int, ...], tuple[int, ...]],
        *,
        most_parts: int,
        traits: ModeTraits,
    ) -> None:
        input_axes, loss_axes = axes
        self.grid, self.loss_axes = grid, loss_axes
        self.reducer = Reducer(dict(model.named_parameters()), layouts, grid)
        traits.no_sync = self.reducer.no_sync
        parts, index = grid.parts(input_axes), grid.place(input_axes)
        share = DataShare(parts, index, together=True, most_parts=most_parts, collective_forward=True)
        super().__init__(model, call, traits=traits, share=share, layouts=Layouts(grid.mesh, grid.world.rank, layouts))
        every = range(len(grid.mesh.axes))
        self._input: Layout = tuple(0 if axis in input_axes else "R" for axis in every)
        self._loss: Layout = tuple(0 if axis in loss_axes else "R" for axis in every)
        self._everywhere: Layout = tuple("R" for _ in every)
        # Of the processes that compute the loss of the same samples, one reports them.
        self._reports = grid.first([axis for axis in every if axis not in loss_axes])

    @abstractmethod
    def begin_micro_batch(self, shape: MicroBatchShape) -> None:
        """Prepares the network for a micro-batch; all processes call it."""

    @override
    def begin(self, part: MicroBatch) -> tuple[Tensor, Tensor, int]:
        self.begin_micro_batch(part.shape)
        # A share without samples is empty here, because it must fit the shards on other processes.
        inputs, labels = part.inputs[: part.share.count], part.labels[: part.share.count]
        labels = self._converted(labels, self._loss, len(labels))
        return inputs, labels, len(labels) if self._reports else 0

    @override
    def finish_gradients(self) -> list[Tensor]:
        self.reducer.finish()
        return []

    @override
    def gradient_norm(self) -> Tensor:
        return total_norm(dict(self.model.named_parameters()), self.layouts, self.grid)

    @override
    def evaluate(
        self, inputs: Tensor, labels: Tensor, count: int, run: Callable[[nn.Module, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        filled = max(count, self.share.most_parts)
        self.grid.batch = filled
        labels = self._converted(labels, self._everywhere, filled)
        outputs = run(self.call, inputs)
        if not self.full_outputs:
            outputs = self._converted(outputs, self._everywhere, filled)
        return outputs[:count], labels[:count]

    def _converted(self, rows: Tensor, target: Layout, count: int) -> Tensor:
        """Converts rows from the layout of the input to another one, for `count` samples over all processes."""
        return convert(rows, self._input, target, Extent((count,), 1), self.grid)

    @override
    def full_state_dict(self) -> dict[str, Any]:
        return {
            name: gather_full(one.detach(), self.layouts[name], self.grid).cpu() if isinstance(one, Tensor) else one
            for name, one in self.model.state_dict().items()
        }

    @override
    def close(self) -> None:
        self.reducer.release()
        self.grid.release()


class PlannedNetwork(NetworkOnMesh):
    """A network whose ops are sharded by a plan."""

    full_outputs = True

    def __init__(self, network: SplitNetwork, loss: Graph | None, traits: ModeTraits) -> None:
        letters, grid = network.letters, network.grid
        most = max(grid.parts(batch_axes(one)) for one in letters.values())
        axes = batch_axes(letters[INPUT]), batch_axes(letters[LOSS])
        super().__init__(network.inner, network, grid, network.layouts, axes, most_parts=most, traits=traits)
        self._split, self._sharded_loss = network, loss

    @override
    def loss_fn(self, loss_fn: LossFn, smoothing: float) -> LossFnWithLabels:
        return SplitLoss(self._split, loss_fn, smoothing, self._sharded_loss)

    @override
    def begin_micro_batch(self, shape: MicroBatchShape) -> None:
        self._split.begin_micro_batch(shape)

    @override
    def finish_update(self) -> None:
        self._split.finish_update()


def split(model: nn.Module, world: World, request: ModeRequest) -> PlannedNetwork:
    """Splits a network, in training mode and equal on all processes, by a plan.

    Raises:
        UserError: the plan doesn't fit.
    """
    plan = request.plan
    if plan is None:
        raise UserError("this mode needs a plan", "parallel", ('--pin "fc=n@dp o@tp"', "or --parallel.plan plan.json"))
    plan.mesh.check_size(world.size)
    group_batch_norms(model)
    graph = describe_network(model, request.picture)
    sharded_loss = None if request.cross_entropy else _shard_loss(graph, request)
    model.eval()
    evaluated = describe_network(model, request.picture)
    model.train()
    cut_alike(graph.ops, evaluated.ops)
    letters = resolve(plan, graph)
    rest = {name: ("r",) * len(plan.mesh.axes) for name in evaluated.ops}
    network = SplitNetwork(model, graph, evaluated, {**rest, **letters}, Grid(plan.mesh, world)).train()
    about = {**plan.about, "notes": graph.notes}
    found = Plan(plan.mesh, plan.ops, plan.default, plan.pinned, network.layouts, about)
    return PlannedNetwork(network, sharded_loss, ModeTraits(plan=found, outputs=network.classes, draws=network.draws))


def _shard_loss(graph: Graph, request: ModeRequest) -> Graph | None:
    """Returns the graph of the user's loss for split classes; None, with a note, if the loss needs all classes."""
    if not isinstance(graph.ops[LOSS].letters["o"], Loop):
        return None
    output = graph.ops[graph.ops[LOSS].sources[0]]
    found: Graph | str = WHOLE_CLASSES
    if request.loss is not None:
        found = describe_loss(request.loss, output.extent.dims[1], output.dtype, request.picture.device)
    if isinstance(found, Graph):
        return found
    graph.keep_classes(found)
    return None
