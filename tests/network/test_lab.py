"""Nothing of a lab of hosts is left behind, however it ends; that hosts are what they say, the other tests show."""

import shlex
import subprocess
from pathlib import Path

import psutil

from tests.e2e.command import wait_until
from tests.network.lab import SOURCE, Lab


def test_two_labs_at_once_are_apart_and_leave_nothing():
    interfaces, namespaces = listed_interfaces(), listed_namespaces()
    with Lab(hosts=2) as one, Lab(hosts=2) as other:
        assert one.prefix != other.prefix
        for lab in (one, other):  # and a session finds this checkout
            code = "import manyhands, socket; print(socket.gethostname(), manyhands.__file__)"
            said = subprocess.check_output([*shlex.split(lab.ssh), "n1", f'{lab.python} -c "{code}"'], text=True)
            assert said.split() == ["n1", str(SOURCE / "manyhands/__init__.py")]
        prefixes, folders = (one.prefix, other.prefix), (one.folder, other.folder)
        # A process that has left its session and ignores polite signals must go too.
        stubborn = "trap '' TERM HUP INT; setsid sleep 1000 & wait"
        shell = one.exec(1, ["sh", "-c", stubborn])
        wait_until(lambda: any("sleep" in name_of(pid) for pid in one.processes(1)))
        pids = one.processes(1) + other.processes(2)
        assert len(pids) > 2
    assert shell.wait(20) == -9
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert not {name for name in listed_interfaces() - interfaces if name.startswith(prefixes)}
    assert not {name for name in listed_namespaces() - namespaces if name.startswith(prefixes)}
    assert not [path for path in Path("/etc/netns").iterdir() if path.name.startswith(prefixes)]
    assert not [folder for folder in folders if folder.exists()]


def name_of(pid):
    """Empty where it has ended since it was listed."""
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return ""


def listed_interfaces():
    return {path.name for path in Path("/sys/class/net").iterdir()}


def listed_namespaces():
    return {line.split()[0] for line in subprocess.check_output(["ip", "netns", "list"], text=True).splitlines()}
