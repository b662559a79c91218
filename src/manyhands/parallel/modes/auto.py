"""Automatic: a search shards each op; where data parallel is fastest, the mode `data` runs instead."""

from torch import nn

from manyhands.core.needs import Need
from manyhands.core.world import World
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.split.network import split

DESCRIPTION = "searches for the fastest sharding of each op, by measured costs"
NORM_GROUPS = True
OFFERS = frozenset[Need]()
NOTHING_ALONE = True
FOLLOWS_PLAN = True


def apply(model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:
    return split(model, world, request)
