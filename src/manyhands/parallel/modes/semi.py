"""Semi-automatic: the user pins how some ops are sharded; the conversions between ops follow."""

from torch import nn

from manyhands.core.needs import Need
from manyhands.core.world import World
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.split.network import split

DESCRIPTION = "shards the ops given by --pin; all other ops shard the batch"
NORM_GROUPS = True
OFFERS = frozenset[Need]()
FOLLOWS_PLAN = True


def apply(model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:
    return split(model, world, request)
