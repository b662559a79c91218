"""Fully sharded data parallel: each process keeps a shard of every parameter (torch's `fully_shard`)."""

import contextlib
from collections.abc import Iterator
from typing import cast

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from manyhands.core.needs import Need
from manyhands.core.world import World
from manyhands.parallel.network import DataShare, ModeRequest, NetworkTraits, ParallelNetwork

NORM_GROUPS = True
OFFERS = frozenset[Need]()


def apply(model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:
    if world.alone:
        return ParallelNetwork(model)
    for parameter in model.parameters():
        # fully_shard requires contiguous parameters; activations stay in channels_last, because the images are.
        parameter.data = parameter.data.contiguous()
    mesh = init_device_mesh(world.device.partition(":")[0], (world.size,), mesh_dim_names=("dp",))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = cast(FSDPModule, model)
    if not request.unused and hasattr(sharded, "set_reduce_scatter_unused_params"):  # torch 2.15
        # Otherwise processes wait for each other if their samples take different branches.
        sharded.set_reduce_scatter_unused_params(True)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    traits = NetworkTraits(float(world.size), no_sync, sharded=True)
    return ParallelNetwork(model, traits=traits, share=DataShare(world.size, world.rank, collective_forward=True))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Returns modules to shard separately: outermost items of Sequential or ModuleList with children and parameters."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            blocks += [
                child for child in module if any(True for _ in child.parameters()) and len(list(child.children()))
            ]
    return [block for block in blocks if not any(block is not other and block in other.modules() for other in blocks)]
