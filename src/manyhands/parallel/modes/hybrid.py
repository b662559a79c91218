"""Hybrid mode: the network is sharded by hand (parallel/hybrid/); the mode only sums gradients."""

from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.needs import Need
from manyhands.core.world import World
from manyhands.parallel.hybrid.network import hybrid_network
from manyhands.parallel.network import ModeRequest, ParallelNetwork

DESCRIPTION = "the network's own code splits the network over the axes of a mesh"
NORM_GROUPS = True
OFFERS = frozenset[Need]()
TAKES_MESH = True


def apply(model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:  # noqa: ARG001 - as all modes
    if request.grid is None:
        hints = ("give --mesh dp=2,tp=2 and a network whose __init__ takes `mesh`",)
        raise UserError("mode hybrid needs a network that was built with a mesh", "parallel.mesh", hints)
    return hybrid_network(model, request.grid, request.samples)
