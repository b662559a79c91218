"""Threads of OpenMP sleep soon, and whatever is started afterwards has the user's own environment."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
from manyhands.cluster.agents.agent import importing
with importing():
    import torch
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
@pytest.mark.parametrize(
    ("own", "told", "left"),
    [({}, "GOMP_SPINCOUNT = '3000'", "None"), ({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT = '77'", "77")],
)
def test_torch_is_loaded_with_short_spins_unless_the_user_says_otherwise(own, told, left):
    before = {name: value for name, value in os.environ.items() if name not in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}
    variables = {**before, "OMP_DISPLAY_ENV": "verbose", **own}  # has it say what it takes
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=True)
    assert told in ended.stderr
    assert ended.stdout.split() == [left]
