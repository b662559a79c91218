"""torch's single-process DataParallel, for comparison: slower than `data`, and BatchNorm depends on the devices."""

import torch
from torch import nn

from manyhands.core.devices import is_accelerator
from manyhands.core.needs import Need
from manyhands.core.world import World
from manyhands.parallel.network import ModeRequest, ParallelNetwork

DESCRIPTION = "one process splits each batch over the devices of this machine"
NORM_GROUPS = False
OFFERS = frozenset[Need]()
ONE_PROCESS = "one process for all devices"


def apply(model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:  # noqa: ARG001 - as all modes
    several = is_accelerator(world.device) and torch.accelerator.device_count() > 1
    return ParallelNetwork(model, nn.DataParallel(model) if several else model, world)
