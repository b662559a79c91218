"""Six of torchvision's networks and six of timm's in every mode: two updates of two processes are those of one."""

import pytest

from tests.processes.families import TIMM, TORCHVISION, compare_all
from tests.processes.ranks import run_on_ranks

pytest.importorskip("timm")


# Networks that train alike on any number of processes (docs/experiments/networks.md). Each has processes of its own,
# since a large one doesn't return all its memory.
@pytest.mark.slow
@pytest.mark.parametrize("name", [*TORCHVISION, *TIMM])
def test_every_mode_trains_every_family_alike(name):
    found = run_on_ranks(compare_all, 2, (name,))
    wrong = [
        f"{name} {mode} on rank {rank}: {error:.0e} {what}"
        for rank, networks in enumerate(found)
        for name, rows in networks.items()
        for mode, _, error, what in rows
        if not error <= 1e-6
    ]
    assert wrong == []
    assert all(len(rows) == 5 for networks in found for rows in networks.values())
