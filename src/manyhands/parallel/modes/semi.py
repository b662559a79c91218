"""Semi-automatic: the user pins how some ops are sharded; the conversions between ops follow."""

from manyhands.core.needs import Need
from manyhands.parallel.split.network import split

DESCRIPTION = "shards the ops given by --pin; all other ops shard the batch"
NORM_GROUPS = True
OFFERS = frozenset[Need]()
FOLLOWS_PLAN = True

apply = split
