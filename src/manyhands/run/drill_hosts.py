"""Three machines on this one for a drill: network namespaces on a bridge, each with a name and an sshd of its own."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from manyhands.core.errors import RunError

TOOLS = ("ip", "ssh", "sshd", "ssh-keygen", "unshare")
COUNT = 3
NAMESPACES = Path("/run/netns")
PATIENCE_S = 30.0
SBIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def no_hosts() -> str:
    """Why they can't be made here; empty: they can."""
    missing = [tool for tool in TOOLS if not _tool(tool)]
    if sys.platform != "linux" or os.geteuid() or missing:
        return "needs Linux, root (sudo), ip of iproute2, and sshd"
    probe = f"mhdrill-{os.getpid()}-n0"
    made = subprocess.run([_tool("ip"), "netns", "add", probe], capture_output=True, check=False)
    if made.returncode == 0:
        _run("ip", "netns", "del", probe)
    return "needs a system that lets root make network namespaces" if made.returncode else ""


class Hosts:
    """n1, n2 and n3, which see each other and this machine, and share its disk.

    Args:
        folder: a new one, for their keys.
    """

    names = tuple(f"n{number}" for number in range(1, COUNT + 1))

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Of addresses that are set apart for tries, so that none of them leads anywhere.
        self.network = f"198.18.{random.SystemRandom().randrange(256)}"
        self.ssh = f"ssh -F {folder}/ssh_config"

    def __enter__(self) -> "Hosts":
        _clear_dead()
        self.folder.mkdir()
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        try:
            self._make()
        except BaseException:
            _clear(os.getpid())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _clear(os.getpid())

    def start(self, name: str) -> None:
        """Starts a host's sshd, and waits until it answers."""
        script = 'hostname "$0" && exec "$@"'
        sshd = (_tool("sshd"), "-D", "-e", "-f", str(self.folder / f"{name}.conf"))
        with (self.folder / f"{name}.log").open("ab") as log:
            subprocess.Popen(
                [_tool("ip"), "netns", "exec", _space(name), "unshare", "--uts", "sh", "-c", script, name, *sshd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + PATIENCE_S
        while subprocess.run([*self.ssh.split(), name, "true"], capture_output=True, check=False).returncode:
            if time.monotonic() > until:
                raise RunError(f"sshd of {name} does not answer: {(self.folder / f'{name}.log').read_text()[-500:]}")
            time.sleep(0.1)

    def cut(self, name: str) -> None:
        """Pulls its cable."""
        _run("ip", "link", "set", _cable(name), "down")

    def mend(self, name: str) -> None:
        """Puts it back in."""
        _run("ip", "link", "set", _cable(name), "up")

    def kill(self, name: str) -> None:
        """Its cable first, so that nobody hears of it, then all that runs there."""
        self.cut(name)
        _kill_all(_space(name))

    def revive(self, name: str) -> None:
        """It is switched on again."""
        self.mend(name)
        self.start(name)

    def processes(self, name: str) -> set[int]:
        """Ids of all that run there."""
        return _processes(_space(name))

    def _make(self) -> None:
        bridge = f"mhd{os.getpid()}br"
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.network}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for file in ("client", *self.names):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / file))
        ends = {name: f"{self.network}.{number}" for number, name in enumerate(self.names, 1)}
        keys = {name: (self.folder / f"{name}.pub").read_text() for name in ends}
        (self.folder / "known").write_text("".join(f"{name},{end} {keys[name]}" for name, end in ends.items()))
        places = "".join(f"Host {name}\n  HostName {end}\n" for name, end in ends.items())
        (self.folder / "ssh_config").write_text(
            f"{places}Host *\n  User root\n  IdentityFile {self.folder}/client\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n  SendEnv DRILL_*\n"
        )
        variables = f'"PATH={Path(sys.executable).parent}:{SBIN}" "PYTHONPATH={Path(__file__).parents[2]}"'
        for name, end in ends.items():
            (self.folder / f"{name}.conf").write_text(
                f"ListenAddress {end}\nHostKey {self.folder}/{name}\nPidFile none\nStrictModes no\n"
                f"AuthorizedKeysFile {self.folder}/client.pub\nPermitRootLogin yes\nPasswordAuthentication no\n"
                f"UsePAM no\nUseDNS no\nMaxStartups 200\nMaxSessions 100\nAcceptEnv DRILL_*\nSetEnv {variables}\n"
            )
            space = _space(name)
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", _cable(name), "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", _cable(name), "master", bridge, "up")
            _run("ip", "-n", space, "addr", "add", f"{end}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-n", space, "link", "set", device, "up")
            self.start(name)


def _space(name: str) -> str:
    return f"mhdrill-{os.getpid()}-{name}"


def _cable(name: str) -> str:
    return f"mhd{os.getpid()}{name}"


def _processes(space: str) -> set[int]:
    found = subprocess.run([_tool("ip"), "netns", "pids", space], capture_output=True, text=True, check=False)
    return {int(word) for word in found.stdout.split()}


def _kill_all(space: str) -> None:
    """New ones may appear while old ones are found."""
    until = time.monotonic() + PATIENCE_S
    while (found := _processes(space)) and time.monotonic() < until:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _clear(owner: int) -> None:
    """Takes away what the drill of this process has made."""
    for path in NAMESPACES.glob(f"mhdrill-{owner}-*"):
        _kill_all(path.name)
        for command in (("link", "del", f"mhd{owner}{path.name.rpartition('-')[2]}"), ("netns", "del", path.name)):
            subprocess.run([_tool("ip"), *command], capture_output=True, check=False)
    subprocess.run([_tool("ip"), "link", "del", f"mhd{owner}br"], capture_output=True, check=False)


def _clear_dead() -> None:
    """Of drills that were killed before they could do it themselves."""
    for owner in {int(path.name.split("-")[1]) for path in NAMESPACES.glob("mhdrill-*-n*")}:
        if not psutil.pid_exists(owner):
            _clear(owner)


def _tool(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}") or ""


def _run(*command: str) -> None:
    done = subprocess.run([_tool(command[0]), *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {done.stderr.strip()}")
