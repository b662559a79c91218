"""Settings for all tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# A deadline would be an assertion about time.
hypothesis.settings.register_profile("manyhands", deadline=None)
hypothesis.settings.load_profile("manyhands")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """No test reads or fills the user's cache, settings or data."""
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    monkeypatch.delenv("MANYHANDS_DATA", raising=False)
