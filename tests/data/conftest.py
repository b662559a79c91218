import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Every test has a cache of its own, and no data folder from outside."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MANYHANDS_CACHE", str(folder))
    for name in ("MANYHANDS_DATA", "MANYHANDS_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data():
    """A function that gives a path in the real data, or skips."""
    base = Path(os.environ.get("MANYHANDS_TEST_DATA", "") or Path(__file__).parents[3] / "shared" / "data")

    def find(name: str) -> Path:
        if not (base / name).exists():
            pytest.skip(f"would have read {base / name} (MANYHANDS_TEST_DATA names another folder)")
        return base / name

    return find
