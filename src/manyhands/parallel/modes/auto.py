"""Automatic mode: a search chooses the sharding of each op, or data parallelism (mode `data`) if that is fastest."""

from manyhands.core.needs import Need
from manyhands.parallel.split.network import shard_by_plan

NORM_GROUPS = True
OFFERS = frozenset[Need]()
NOTHING_ALONE = True
FOLLOWS_PLAN = True

apply = shard_by_plan
