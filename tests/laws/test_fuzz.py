"""Every reader of files from outside, given spoilt files for a little while; `python -m bench.fuzz_readers` goes on."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_spoilt_file_ends_in_a_traceback_a_hang_or_a_gigabyte():
    seed = str(random.randrange(10**6))
    command = [sys.executable, "-m", "bench.fuzz_readers", "--seconds", "10", "--seed", seed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
