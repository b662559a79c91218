"""Who agrees with whom, under any way of dealing ranks to machines; and what keeps local steps in time."""

import platform
from dataclasses import replace

import pytest
import torch.distributed as dist

from manyhands.train.agreeing import places_of
from tests.processes.ranks import run_on_ranks

# By rank: (name of its machine, processes there, its local rank there).
DEALT = {
    "blocks": [("a", 2, 0), ("a", 2, 1), ("b", 2, 0), ("b", 2, 1)],
    "turns": [("a", 2, 0), ("b", 2, 0), ("a", 2, 1), ("b", 2, 1)],
    "uneven": [("b", 1, 0), ("a", 3, 0), ("a", 3, 1), ("a", 3, 2)],
    "uneven turns": [("a", 3, 0), ("b", 1, 0), ("a", 3, 1), ("a", 3, 2)],
    "one name": [("x", 2, 0), ("x", 2, 1), ("x", 2, 0), ("x", 2, 1)],
    "one machine": [("a", 4, 0), ("a", 4, 1), ("a", 4, 2), ("a", 4, 3)],
    "one each": [("x", 1, 0), ("x", 1, 0), ("x", 1, 0), ("x", 1, 0)],
}
MACHINES = {
    "blocks": [(0, 1), (2, 3)],
    "turns": [(0, 2), (1, 3)],
    "uneven": [(0,), (1, 2, 3)],
    "uneven turns": [(0, 2, 3), (1,)],
    "one name": [(0, 1), (2, 3)],
    "one machine": [(0,), (1,), (2,), (3,)],
    "one each": [(0,), (1,), (2,), (3,)],
}


def _places(world, dealt):
    name, size, local_rank = dealt[world.rank]
    platform.node = lambda: name  # of this process alone
    places = places_of(replace(world, local_rank=local_rank, local_size=size), "auto")
    return places.speakers, places.machine, dist.get_process_group_ranks(places.group) if places.group else None


@pytest.mark.parametrize("name", DEALT)
def test_each_machine_has_its_own_processes_and_one_that_speaks(name):
    machines = MACHINES[name]
    for rank, (speakers, machine, group) in enumerate(run_on_ranks(_places, 4, DEALT[name])):
        assert speakers == tuple(one[0] for one in machines)
        assert machine == next(one for one in machines if rank in one)
        assert group is None or tuple(group) == machine
        assert (group is None) == (len(machines) == 4)
