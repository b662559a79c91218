"""Where processes that met by hand are."""

import pytest

from manyhands.core.world import ProcessInfo
from manyhands.parallel.group.join import _among_neighbours


@pytest.mark.parametrize(("rank", "wanted"), [(0, (0, 2)), (1, (0, 1)), (2, (1, 2))])
def test_processes_that_met_by_hand_count_their_neighbours(rank, wanted):
    machines = enumerate(["here", "there", "here"])
    present = {number: {"machine": machine} for number, machine in machines}
    found = _among_neighbours(ProcessInfo(rank=rank, size=3), present)
    assert (found.local_rank, found.local_size) == wanted
