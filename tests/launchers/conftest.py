"""Each test in a folder of its own, and one Slurm for all that need it."""

import tempfile
from pathlib import Path

import pytest

from tests.e2e.conftest import here as here
from tests.launchers.slurm import NoSlurm, Slurm


@pytest.fixture(scope="module")
def slurm():
    # Sockets have short names, and pytest's folders long ones.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        try:
            found = Slurm(Path(folder))
        except NoSlurm as error:
            pytest.skip(f"no Slurm here: {error}")
        yield found
        found.stop()
