"""Applies a plan to a network: what the modes semi and auto do."""

from collections.abc import Callable

from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.describe import describe_network
from manyhands.parallel.execute import SplitNetwork, batch_axes
from manyhands.parallel.graph import INPUT, LOSS
from manyhands.parallel.grid import Grid
from manyhands.parallel.loss import SplitLoss
from manyhands.parallel.network import Cutting, How, ParallelNetwork
from manyhands.parallel.norm import group_batch_norms
from manyhands.parallel.plan import Plan, resolve
from manyhands.parallel.reduce import Reducer


def split(model: nn.Module, world: World, how: How) -> ParallelNetwork:
    """Cuts a network by a plan and has it run so.

    Args:
        model: in training, whole and equal on all processes; its parameters become this process's pieces.
        world: who takes part; as many as the plan's mesh has places.
        how: the plan and a sample.

    Raises:
        UserError: the plan doesn't fit the network, the mesh or the number of processes.
    """
    plan = how.plan
    if plan is None:
        raise UserError("this mode needs a plan", "parallel", ('--pin "fc=n@dp o@tp"', "or --parallel.plan plan.json"))
    if plan.mesh.size != world.size:
        mend = ("another --mesh, or another number of processes",)
        raise UserError(f"the mesh {plan.mesh} has {plan.mesh.size} places for {world.size} processes", "mesh", mend)
    group_batch_norms(model)
    graph = describe_network(model, how.picture)
    if not how.cross_entropy:
        graph.keep_classes()
    letters = resolve(plan, graph)
    model.eval()
    evaluated = describe_network(model, how.picture)
    model.train()
    rest = {name: ("r",) * len(plan.mesh.axes) for name in evaluated.ops}
    grid = Grid(plan.mesh, world)
    network = SplitNetwork(model, graph, evaluated, {**rest, **letters}, grid).train()
    reducer = Reducer(dict(model.named_parameters()), network.layouts, grid)
    cutting = Cutting(
        grid=grid,
        layouts=network.layouts,
        input_axes=batch_axes(letters[INPUT]),
        loss_axes=batch_axes(letters[LOSS]),
        begin_pass=network.begin_pass,
        finish_backward=reducer.finish,
        finish_update=network.finish_update,
        judge=lambda criterion, smoothing: SplitLoss(network, criterion, smoothing),
        release=_releasing(reducer, grid),
        plan=Plan(
            plan.mesh, plan.ops, plan.default, plan.pinned, network.layouts, {**plan.about, "notes": graph.notes}
        ),
        outputs=network.classes,
        draws=network.draws,
        most_parts=max(plan.mesh.parts(batch_axes(one)) for one in letters.values()),
    )
    return ParallelNetwork(
        call=network,
        inner=model,
        hold_back=reducer.hold_back,
        collective_forward=True,
        cutting=cutting,
    )


def _releasing(reducer: Reducer, grid: Grid) -> Callable[[], None]:
    def release() -> None:
        reducer.release()
        grid.release()

    return release
