import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch):
    monkeypatch.delenv("MANYHANDS_MIRROR", raising=False)


@pytest.fixture(scope="session")
def real_data():
    """A function that gives a path in the real data, or skips."""
    base = Path(os.environ.get("MANYHANDS_TEST_DATA", "") or Path(__file__).parents[3] / "shared" / "data")

    def find(name: str) -> Path:
        if not (base / name).exists():
            pytest.skip(f"would have read {base / name} (MANYHANDS_TEST_DATA names another folder)")
        return base / name

    return find
