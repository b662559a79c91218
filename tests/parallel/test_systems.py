"""What is said where a system or a device isn't one that manyhands can use."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.core.world import ProcessInfo
from manyhands.parallel.group import join as group

NO_LOCKS = "import sys; sys.modules['fcntl'] = None\n"


@pytest.mark.parametrize(
    "code",
    [
        "from manyhands.cli.main import main\nmain(['train'])",
        "from manyhands.cli.main import main\nmain(['--help'])",
        "import manyhands\ntry:\n    manyhands.fit\nexcept manyhands.UserError as error:\n"
        "    sys.exit('manyhands: ' + str(error))",
    ],
)
def test_a_system_without_locks_of_files_is_one_line(code):
    """As on Windows, where Python has no fcntl."""
    done = subprocess.run([sys.executable, "-c", NO_LOCKS + code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("manyhands: manyhands runs on Linux, macOS and WSL2 on Windows")
    assert len(done.stderr.splitlines()) <= 3


def with_apples_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: SimpleNamespace(type="mps"))


@pytest.mark.parametrize("kind", ["mps", "mps:0", "mps:1"])
def test_a_machine_without_apples_gpu_says_so(kind, monkeypatch):
    if kind == "mps:1":
        with_apples_gpu(monkeypatch)
    with pytest.raises(UserError, match="there is no mps:1" if kind == "mps:1" else "this machine has no mps device"):
        group.join(ProcessInfo(device=kind), "", 60, print)


def test_apples_gpu_is_for_one_process(monkeypatch):
    """Read, not run: nobody here has such a computer; what is decided for one is."""
    with_apples_gpu(monkeypatch)
    assert group._device(ProcessInfo(device="mps:0")) == group._device(ProcessInfo(device="auto")) == "mps"
    pair = ProcessInfo(size=2, local_size=2, device="mps")
    with pytest.raises(UserError, match="2 processes can't communicate on mps"):
        group._device(pair)
    assert group._device(ProcessInfo(size=2, local_size=2, device="auto")) == "cpu"
