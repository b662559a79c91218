"""Single-process mode, on one device."""

from torch import nn

from manyhands.core.needs import AVERAGE_HOOK, OWN_AVERAGE, WHOLE_GRADIENTS
from manyhands.core.world import World
from manyhands.parallel.network import ModeRequest, ParallelNetwork

NORM_GROUPS = True
OFFERS = frozenset({WHOLE_GRADIENTS, OWN_AVERAGE, AVERAGE_HOOK})
ONE_PROCESS = "one process"


def apply(model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:  # noqa: ARG001 - as all modes
    return ParallelNetwork(model, world=world)
