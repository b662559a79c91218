"""Shards a network by a plan."""

from torch import nn
from typing_extensions import override

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.network import LossFn, LossFnWithLabels, MicroBatchShape, ModeRequest, NetworkTraits
from manyhands.parallel.on_mesh import NetworkOnMesh
from manyhands.parallel.plan import Plan
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.parallel.split import execute, strategy, tracing
from manyhands.parallel.split.graph import INPUT, LOSS, Graph, Sharding
from manyhands.parallel.split.sharded_loss import WHOLE_CLASSES, ShardedLoss, describe_loss


class PlannedNetwork(NetworkOnMesh):
    """The network of the modes semi and auto, whose ops are sharded by a plan."""

    full_outputs = True

    def __init__(self, network: execute.SplitNetwork, loss: Graph | None, traits: NetworkTraits) -> None:
        letters, grid = network.letters, network.grid
        most = max(grid.parts(execute.batch_axes(one)) for one in letters.values())
        axes = execute.batch_axes(letters[INPUT]), execute.batch_axes(letters[LOSS])
        super().__init__(network.inner, network, grid, network.layouts, axes, most_parts=most, traits=traits)
        self._split, self._sharded_loss = network, loss

    @override
    def loss_fn(self, loss_fn: LossFn, smoothing: float) -> LossFnWithLabels:
        return ShardedLoss(self._split, loss_fn, smoothing, self._sharded_loss)

    @override
    def begin_micro_batch(self, shape: MicroBatchShape) -> None:
        self._split.begin_micro_batch(shape)

    @override
    def finish_update(self) -> None:
        self._split.finish_update()


def shard_by_plan(model: nn.Module, world: World, request: ModeRequest) -> PlannedNetwork:
    """Shards a network (training mode, equal on all ranks) by a plan. A collective. Raises UserError: invalid plan."""
    plan = request.plan
    if plan is None:
        raise UserError("the plan is missing", "parallel", ('set --pin "fc=n@dp o@tp" or --parallel.plan plan.json',))
    plan.mesh.check_size(world.size)
    group_batch_norms(model)
    graph = tracing.describe_network(model, request.picture)
    sharded_loss = None if request.cross_entropy else _shard_loss(graph, request)
    model.eval()
    evaluated = tracing.describe_network(model, request.picture)
    model.train()
    tracing.refuse_training_only_letters(graph.ops, evaluated.ops)
    letters = strategy.resolve_letters(plan, graph)
    replicated = {name: ("r",) * len(plan.mesh.axes) for name in evaluated.ops}
    network = execute.SplitNetwork(model, graph, evaluated, {**replicated, **letters}, Grid(plan.mesh, world)).train()
    about = {**plan.about, "notes": graph.notes}
    found = Plan(plan.mesh, plan.ops, plan.default, plan.pinned, network.layouts, about)
    traits = NetworkTraits(plan=found, class_count=network.classes, is_random=network.draws)
    return PlannedNetwork(network, sharded_loss, traits)


def _shard_loss(graph: Graph, request: ModeRequest) -> Graph | None:
    """Returns the graph of the user's loss for sharded classes. Returns None, with a note, if it needs all classes."""
    if not isinstance(graph.ops[LOSS].letters["o"], Sharding):
        return None
    output = graph.ops[graph.ops[LOSS].sources[0]]
    found: Graph | str = WHOLE_CLASSES
    if request.loss is not None:
        found = describe_loss(request.loss, output.extent.dims[1], output.dtype, request.picture.device)
    if isinstance(found, Graph):
        return found
    graph.refuse_sharded_classes(found)
    return None
