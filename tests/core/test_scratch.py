"""Temporary folders and agents go with their process, however that ends."""

import os
import subprocess
import sys
import tempfile

import pytest

from manyhands.core import scratch as module
from manyhands.core.scratch import abandoned, scratch
from tests.e2e.command import wait_until


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(module, "NEW_S", -1.0)
    yield tmp_path
    tempfile.tempdir = None


def child(code):
    """A process that says so when it is ready."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ, **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


HOLDS = """
import os, time
from manyhands.core.scratch import scratch
with scratch("test", swept={swept}) as folder:
    (folder / "file").touch()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(temporary):
    with child(HOLDS.format(swept=False)) as process:
        (left,) = temporary.glob("manyhands-test-*")
        assert not list(abandoned())
        process.kill()
    (temporary / "manyhands-mine").mkdir()
    (temporary / "manyhands-link").symlink_to(left)
    assert list(abandoned()) == [left]
    with scratch("next") as folder:
        assert not left.exists()
        assert (temporary / "manyhands-mine").exists()
    assert not folder.exists()


def test_nothing_is_left_of_a_killed_process_where_a_shell_waits_for_its_end(temporary):
    with child(HOLDS.format(swept=True)) as process:
        assert list(temporary.glob("manyhands-test-*"))
        process.kill()
    wait_until(lambda: not list(temporary.iterdir()))
    with scratch("next", swept=True) as folder:
        assert folder.is_dir()
    assert not folder.exists()


BUSY = """
import time
from manyhands.cluster.agents.connection import Wire
with Wire(1).watch_launcher(lambda: print("cleaned up", flush=True)):
    print("ready", flush=True)
    if {busy}:
        time.sleep(60)
print("left by itself", flush=True)
input()
"""


@pytest.mark.parametrize("busy", [True, False])
def test_an_agent_ends_with_its_head_whatever_it_is_busy_with_and_loses_no_order(busy):
    with child(BUSY.format(busy=busy)) as process:
        assert busy or process.stdout.readline() == "left by itself\n"
        process.stdin.write("an order\n")
        process.stdin.close()
        assert process.wait(30) == busy
        assert process.stdout.read() == "cleaned up\n" * busy
