"""Kills while checkpoints are written, in short; `make soak` does as many as are wanted."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_what_is_torn_is_never_loaded():
    seed = str(random.randrange(10**6))
    command = [sys.executable, "-m", "tests.faults.soak_saves", "kills", "--count", "20", "--seed", seed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["holds"]
