"""Where processes that met by hand are, and what an agent's head listens to."""

import pytest

from manyhands.cluster.link import _parse
from manyhands.core.world import Membership
from manyhands.parallel.group import _among_neighbours


@pytest.mark.parametrize(("rank", "wanted"), [(0, (0, 2)), (1, (0, 1)), (2, (1, 2))])
def test_processes_that_met_by_hand_count_their_neighbours(rank, wanted):
    found = _among_neighbours(Membership(rank=rank, size=3), ["here", "there", "here"])
    assert (found.local_rank, found.local_size) == wanted


def test_a_greeting_of_the_other_shell_is_no_message():
    assert _parse(b"Welcome to n2!") is None
    assert _parse(b"[1, 2]") is None
    assert _parse(b'{"kind": "alive"}') == {"kind": "alive"}
