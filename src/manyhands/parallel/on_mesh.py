"""Applies a plan to a network, and a network whose tensors and samples are spread over a mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import override

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh
from manyhands.core.world import World
from manyhands.parallel.execute import SplitNetwork, batch_axes, shard_tensor
from manyhands.parallel.graph import INPUT, LOSS, Graph, Loop
from manyhands.parallel.grid import Grid
from manyhands.parallel.network import (
    LossFn,
    LossFnWithLabels,
    MicroBatch,
    MicroBatchShape,
    ModeRequest,
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


@dataclass(kw_only=True)
class NetworkOnMesh(ParallelNetwork):
    """See `ParallelNetwork`."""

    grid: Grid  # the processes
    reducer: Reducer  # sums gradients
    input_axes: tuple[int, ...]  # numbers of the axes along which processes are given different samples
    loss_axes: tuple[int, ...]  # numbers of the axes along which processes compute the loss of different samples
    begin_micro_batch: Callable[[MicroBatchShape], None]  # is told of each micro-batch before it
    move_statistics: Callable[[], None]  # moves BatchNorm's running statistics
    # makes the loss function one for this network's outputs; None where they are as a whole network's
    make_loss_fn: Callable[[LossFn, float], LossFnWithLabels] | None = None
    # of the labels of a process's inputs, those of its outputs; None where they are the same
    labels_of_outputs: Callable[[Tensor], Tensor] | None = None
    whole_outputs: bool = True  # in evaluation each process gets the outputs of all samples; False: of its own
    together: ClassVar[bool] = True

    @property
    @override
    def runs_alone(self) -> bool:
        return False

    @property
    @override
    def mesh(self) -> Mesh:
        return self.grid.mesh

    @property
    @override
    def rank(self) -> int:
        return self.grid.world.rank

    @override
    def replicas(self, size: int) -> int:
        return self.grid.parts(self.input_axes)

    @override
    def replica(self, rank: int) -> int:
        return self.grid.place(self.input_axes)

    @override
    def saves(self, rank: int) -> bool:
        return True

    @override
    def loss_fn(self, loss_fn: LossFn, smoothing: float) -> LossFnWithLabels:
        return self.make_loss_fn(loss_fn, smoothing) if self.make_loss_fn else super().loss_fn(loss_fn, smoothing)

    @override
    def begin(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        self.begin_micro_batch(part.shape)
        # What others hold of the same samples must fit, so a share of no samples is empty here.
        return part.inputs[: part.share.count], part.labels[: part.share.count]

    @override
    def own_labels(self, labels: Tensor) -> Tensor:
        return self.labels_of_outputs(labels) if self.labels_of_outputs else labels

    @override
    def counted(self, part: MicroBatch, labels: Tensor) -> int:
        return len(labels) if self.counts else 0

    @property
    def counts(self) -> bool:
        """True on one of the processes that compute the loss of the same samples."""
        axes = range(len(self.mesh.axes))
        return self.grid.first([axis for axis in axes if axis not in self.loss_axes])

    @override
    def finish_gradients(self) -> None:
        self.reducer.finish()

    @override
    def finish_update(self, size: int = 0) -> None:
        self.move_statistics()

    @override
    def gradient_norm(self) -> Tensor:
        return total_norm(dict(self.inner.named_parameters()), self.layouts, self.grid)

    @override
    def first_holder(self, name: str, rank: int) -> int:
        return self.layouts[name].first_holder(self.mesh, rank) if name in self.layouts else 0

    @override
    def gather_rows(self, rows: Tensor, count: int) -> Tensor:
        self.grid.batch = count
        axes = range(len(self.mesh.axes))
        here: Layout = tuple(0 if axis in self.input_axes else "R" for axis in axes)
        return convert(rows, here, ("R",) * len(axes), Extent((count,), 1), self.grid)

    @override
    def gather_outputs(self, rows: Tensor, count: int) -> Tensor:
        return rows if self.whole_outputs else self.gather_rows(rows, count)

    @override
    def piece(self, name: str, tensor: Tensor) -> Tensor:
        return shard_tensor(tensor, self.layouts[name], self.grid)

    @override
    def full_state_dict(self) -> dict[str, Tensor]:
        return {
            name: gather_full(one.detach(), self.layouts[name], self.grid).cpu() if isinstance(one, Tensor) else one
            for name, one in self.inner.state_dict().items()
        }

    @override
    def release(self) -> None:
        self.reducer.release()
        self.grid.release()


def split(model: nn.Module, world: World, request: ModeRequest) -> NetworkOnMesh:
    """Cuts a network, in training and equal on all processes, by a plan. Raises UserError: the plan doesn't fit."""
    plan = request.plan
    if plan is None:
        raise UserError("this mode needs a plan", "parallel", ('--pin "fc=n@dp o@tp"', "or --parallel.plan plan.json"))
    plan.mesh.check_size(world.size)
    group_batch_norms(model)
    graph = describe_network(model, request.picture)
    sharded_loss = None if request.cross_entropy else _cut_loss(graph, request)
    model.eval()
    evaluated = describe_network(model, request.picture)
    model.train()
    cut_alike(graph.ops, evaluated.ops)
    letters = resolve(plan, graph)
    rest = {name: ("r",) * len(plan.mesh.axes) for name in evaluated.ops}
    grid = Grid(plan.mesh, world)
    network = SplitNetwork(model, graph, evaluated, {**rest, **letters}, grid).train()
    reducer = Reducer(dict(model.named_parameters()), network.layouts, grid)
    return NetworkOnMesh(
        call=network,
        inner=model,
        no_sync=reducer.no_sync,
        collective_forward=True,
        grid=grid,
        reducer=reducer,
        layouts=network.layouts,
        input_axes=batch_axes(letters[INPUT]),
        loss_axes=batch_axes(letters[LOSS]),
        begin_micro_batch=network.begin_micro_batch,
        move_statistics=network.finish_update,
        make_loss_fn=lambda loss_fn, smoothing: SplitLoss(network, loss_fn, smoothing, sharded_loss),
        labels_of_outputs=SplitLoss(network).labels,
        plan=Plan(
            plan.mesh, plan.ops, plan.default, plan.pinned, network.layouts, {**plan.about, "notes": graph.notes}
        ),
        outputs=network.classes,
        draws=network.draws,
        most_parts=max(plan.mesh.parts(batch_axes(one)) for one in letters.values()),
    )


def _cut_loss(graph: Graph, request: ModeRequest) -> Graph | None:
    """The loss of the user's own as a graph of its own; without one it sees all classes, for the reason kept."""
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
