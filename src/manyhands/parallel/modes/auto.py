"""Automatic: a search shards each op; where data parallel is fastest, the mode `data` runs instead."""

from manyhands.core.needs import Need
from manyhands.parallel.split.network import split

DESCRIPTION = "searches for the fastest sharding of each op, by measured costs"
NORM_GROUPS = True
OFFERS = frozenset[Need]()
NOTHING_ALONE = True
FOLLOWS_PLAN = True

apply = split
