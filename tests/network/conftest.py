"""Hosts for tests; where none can be made the tests are skipped with the reason."""

import pytest

from tests.e2e.conftest import here as here
from tests.network.lab import Lab, why_not
from tests.network.runs import own_disk

REASON = why_not()


def pytest_collection_modifyitems(items):
    for item in items:
        if "network" in item.path.parts:
            item.add_marker(pytest.mark.network)
            if REASON:
                item.add_marker(pytest.mark.skip(reason=f"NO LAB OF HOSTS: {REASON}"))


@pytest.fixture
def forks():
    """Whether agents are forks (tests.fork_server); a test for which they are started is parametrized with False."""
    return True


@pytest.fixture
def lab(forks):
    """Three hosts of the test's own, with links as fast as they go."""
    with Lab(hosts=3, forks=forks) as made:
        yield made


@pytest.fixture
def apart(lab, here):
    """Hosts each of which has a disk of its own at one place."""
    for host in lab.hosts:
        own_disk(lab, host)
    return lab
