"""The agent looks for no garbage while it imports torch, nor in what is there by then."""

import gc

import pytest

from manyhands.cluster.agents.agent import importing


@pytest.fixture(autouse=True)
def _as_before():
    yield
    gc.enable()
    gc.unfreeze()


def test_what_was_imported_is_left_to_be_shared():
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_garbage_is_looked_for_again_after_a_mistake():
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
