"""A head has two pipes for each machine: more than a shell allows at first."""

import subprocess
import sys

import pytest

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
