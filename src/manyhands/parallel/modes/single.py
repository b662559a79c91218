"""One process, one device."""

from torch import nn

from manyhands.core.world import World
from manyhands.parallel.network import How, ParallelNetwork

DESCRIPTION = "one process, one device"
NORM_GROUPS = True


def apply(model: nn.Module, world: World, how: How) -> ParallelNetwork:  # noqa: ARG001 - the modes' contract
    """The network as it is."""
    return ParallelNetwork(call=model, inner=model)
