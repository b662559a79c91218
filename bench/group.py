"""The process group of a bench's workers, each of which was told its place on its command line."""

import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from manyhands.core.world import World

GROUP_TIMEOUT_S = 300


@contextmanager
def joined(given):
    """Joins with one thread; `given` has rank, size and init. Gives the world."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=given.init, rank=given.rank, world_size=given.size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )  # fmt: skip
    try:
        yield World(given.rank, given.size, given.rank, given.size, "cpu", "gloo")
    finally:
        dist.destroy_process_group()
