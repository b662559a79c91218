"""torch's single-process data parallel over the devices of one machine: slower than `data`, here for comparison.

Each device normalises what it has, so that the result depends on the number of devices.
"""

import torch
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.network import How, ParallelNetwork

DESCRIPTION = "one process splits each batch over the devices of this machine"
NORM_GROUPS = False


def apply(model: nn.Module, world: World, how: How) -> ParallelNetwork:  # noqa: ARG001 - the modes' contract
    """Wraps the network in torch's DataParallel; on a machine without accelerators it runs as it is.

    Raises:
        UserError: there are several processes; this mode is for one.
    """
    if not world.alone:
        raise UserError(
            f"dataparallel is one process for all devices, and there are {world.size} processes",
            "parallel.mode",
            ("--parallel data is the mode for several processes", "or -n 1"),
        )
    wrapped = nn.DataParallel(model) if torch.cuda.device_count() > 1 and world.device.startswith("cuda") else model
    return ParallelNetwork(call=wrapped, inner=model)
