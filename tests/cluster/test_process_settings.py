"""What processes of manyhands set for themselves: garbage, OpenMP's threads, open files."""

import gc
import os
import subprocess
import sys

import pytest

from manyhands.cluster.agents.agent import importing_torch

SCRIPT = """
import os
from manyhands.cluster.agents.agent import importing_torch
with importing_torch():
    import torch
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
def test_torch_is_loaded_with_short_spins_unless_the_user_says_otherwise(monkeypatch):
    variables = {name: value for name, value in os.environ.items() if name not in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}
    variables["OMP_DISPLAY_ENV"] = "verbose"  # has it say what it takes
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=True)
    assert "GOMP_SPINCOUNT = '3000'" in ended.stderr
    assert ended.stdout.split() == ["None"]
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    with importing_torch():
        assert os.environ["GOMP_SPINCOUNT"] == "77"
    assert os.environ["GOMP_SPINCOUNT"] == "77"
    gc.unfreeze()


RAISED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
from manyhands.cluster.agents.machines import allow_open_files
from manyhands.core.errors import UserError
try:
    allow_open_files(200)
except UserError as error:
    print(error.message)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("hard", "said"),
    [
        (400, ["200"]),
        (100, ["the connections to the machines need 200 open files, but the limit for this user is 100", "64"]),
    ],
)
def test_as_many_files_as_the_machines_need_may_be_open_or_it_is_said(hard, said):
    done = subprocess.run([sys.executable, "-c", RAISED.format(hard=hard)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == said
