"""Applies a plan to a network: what the modes semi and auto do."""

from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.execute import SplitNetwork, batch_axes
from manyhands.parallel.graph import INPUT, LOSS, Graph, Loop
from manyhands.parallel.grid import Grid
from manyhands.parallel.network import ModeRequest
from manyhands.parallel.norm import group_batch_norms
from manyhands.parallel.on_mesh import NetworkOnMesh
from manyhands.parallel.plan import Plan
from manyhands.parallel.reduce import Reducer
from manyhands.parallel.sharded_loss import WHOLE_CLASSES, SplitLoss, describe_loss
from manyhands.parallel.strategy import resolve
from manyhands.parallel.tracing import describe_network
from manyhands.parallel.weights import cut_alike


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
