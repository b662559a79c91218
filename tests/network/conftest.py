"""Hosts for tests; where none can be made the tests are skipped with the reason."""

import pytest

from tests.network.lab import Lab, why_not

REASON = why_not()


def pytest_collection_modifyitems(items):
    for item in items:
        if "network" in item.path.parts:
            item.add_marker(pytest.mark.network)
            if REASON:
                item.add_marker(pytest.mark.skip(reason=f"NO LAB OF HOSTS: {REASON}"))


@pytest.fixture
def lab():
    """Three hosts of the test's own, with links as fast as they go."""
    with Lab(hosts=3) as made:
        yield made


@pytest.fixture(scope="module")
def calm_lab():
    """Three hosts that a module's tests share and don't change."""
    with Lab(hosts=3) as made:
        yield made
