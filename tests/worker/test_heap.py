"""Freed memory that is kept isn't taken from the system again."""

import ctypes
import subprocess
import sys

import pytest

# Pages that the system gives for a tensor of 96 MiB that is made and freed ten times over. At first none of the places
# that were freed fits, since each is aligned.
SCRIPT = """
import resource, sys, torch
from manyhands.worker.heap import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(20):
    torch.ones(96 << 18)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(96 << 18)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_what_was_freed_is_used_again():
    pages = {
        way: int(subprocess.run([sys.executable, "-c", SCRIPT, way], capture_output=True, check=True).stdout)
        for way in ("kept", "given back")
    }
    assert pages["kept"] < pages["given back"] / 10
