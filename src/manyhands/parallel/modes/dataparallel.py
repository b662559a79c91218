"""torch's DataParallel: one process, slower than mode `data`. BatchNorm depends on the number of devices."""

import torch
from torch import nn

from manyhands.core import devices, needs
from manyhands.core.world import World
from manyhands.parallel.network import ModeRequest, ParallelNetwork

NORM_GROUPS = False
OFFERS = frozenset[needs.Need]()
ONE_PROCESS = "one process for all devices"


def apply(model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:  # noqa: ARG001 - as all modes
    several = devices.is_accelerator(world.device) and torch.accelerator.device_count() > 1
    return ParallelNetwork(model, nn.DataParallel(model) if several else model, world)
