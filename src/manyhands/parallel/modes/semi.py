"""Semi-automatic mode: the user sets the sharding of some ops; tensors are converted between ops."""

from manyhands.core.needs import Need
from manyhands.parallel.split.network import shard_by_plan

NORM_GROUPS = True
OFFERS = frozenset[Need]()
FOLLOWS_PLAN = True

apply = shard_by_plan
