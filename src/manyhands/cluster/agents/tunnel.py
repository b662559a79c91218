"""Ssh tunnels between machines, and the ssh processes that carry them.

    tunnels = SshTunnels(machines, options, folder, lambda: None)  # opens a connection to each machine, in parallel
    port = tunnels.forward_remote("n2", "127.0.0.1:5000")  # forwards `port` on n2's loopback to port 5000 here
    tunnels.forward_local("n2", f"{folder}/x", "127.0.0.1:7")  # forwards Unix socket x here to port 7 of n2's loopback
    tunnels.close()

Each end is ADDRESS:PORT, or the path of a Unix socket that only this user can open. Tunnels don't use the agents' ssh
processes, so bulk data does not delay heartbeats. After the parent process has ended, even if it was killed, an ssh
process ends once no forwarded connection is open.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from manyhands.cluster.agents import switchboard
from manyhands.cluster.agents.connection import end_processes
from manyhands.cluster.agents.ssh import ssh_command
from manyhands.cluster.hosts.inventory import LOOPBACK, Machine
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import RunError
from manyhands.core.scratch import scratch
from manyhands.core.timeouts import SWITCHBOARD_S, TUNNEL_ASK_S, TUNNEL_CLOSE_S, TUNNEL_OPEN_S
from manyhands.parallel.group.tunnel_ends import TunnelEnds, has_short_socket_paths

# Remote command (also for csh); ends with its standard input, and thus with its parent.
_STAY = f"echo {switchboard.READY}; exec cat"
POLL_S = 0.05


class TunnelError(Exception):
    """Raised if an ssh tunnel to a machine can't be opened; the message has the reason."""


class _Child(subprocess.Popen[bytes]):
    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name, self.ready, self._written = name, False, b""
        descriptor, log = tempfile.mkstemp(suffix=".log", dir=folder)
        self._log, pipe = Path(log), subprocess.PIPE
        with os.fdopen(descriptor, "wb") as file:
            super().__init__(command, stdin=pipe, stdout=pipe, stderr=file, start_new_session=True)
        assert self.stdout
        os.set_blocking(self.stdout.fileno(), False)

    def pending(self) -> bool:
        """Returns False once the process is `ready` or has ended."""
        assert self.stdout
        ended = self.poll() is not None
        with contextlib.suppress(BlockingIOError):
            self._written = (self._written + os.read(self.stdout.fileno(), 1 << 16))[-(1 << 16) :]
        self.ready = self.ready or switchboard.READY.encode() in self._written.splitlines()
        return not (self.ready or ended)

    def last_error_line(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return lines[-1].strip() if lines else ""


class ChildProcesses:
    """Child processes that print READY after their start, and exit when their standard input is closed."""

    def __init__(self, folder: Path = Path()) -> None:
        self.folder = folder  # files in it receive standard error
        self._ready: list[_Child] = []

    def start(
        self, commands: Mapping[str, Sequence[str]], patience_s: float, meanwhile: Callable[[], object] = lambda: None
    ) -> dict[str, str]:
        """Starts processes and waits until they are ready. Returns {name: last error line} for processes that failed.

        `patience_s` limits the wait for all processes, during which `meanwhile` is called every POLL_S.
        """
        started: list[_Child] = []
        until = time.monotonic() + patience_s
        try:
            for name, command in commands.items():
                started.append(_Child(name, command, self.folder))
            while sum(child.pending() for child in started) and time.monotonic() < until:
                meanwhile()
                time.sleep(POLL_S)
        except BaseException:
            end_processes(started, TUNNEL_CLOSE_S, terminate=True)
            raise
        self._ready += [child for child in started if child.ready]
        failed = [child for child in started if not child.ready]
        end_processes(failed, TUNNEL_CLOSE_S, terminate=True)
        return {child.name: child.last_error_line() for child in failed}

    def ended(self) -> str:
        """Returns a message about the first child process that ended unexpectedly; an empty string while all run."""
        for child in self._ready:
            if (code := child.poll()) is not None:
                return f"the ssh tunnel to {child.name} ended ({child.last_error_line() or f'exit code {code}'})"
        return ""

    def close(self) -> None:
        end_processes(self._ready, TUNNEL_CLOSE_S, terminate=True)
        self._ready.clear()


class SshTunnels(ChildProcesses):
    """Ssh connections with port forwarding. Raises TunnelError. `folder`, a short path, has their control sockets."""

    def __init__(
        self, machines: Sequence[Machine], options: ClusterOptions, folder: Path, meanwhile: Callable[[], object]
    ) -> None:
        super().__init__(folder)
        self._options = options
        self._machines = {machine.name: (number, machine) for number, machine in enumerate(machines)}
        own = ("-o", "ControlMaster=yes", "-o", "ControlPersist=no", "-o", "ClearAllForwardings=yes", "-a", "-x")
        commands = {name: [*self._command(name, *own), _STAY] for name in self._machines}
        for name, error in self.start(commands, TUNNEL_OPEN_S, meanwhile).items():
            self.close()
            raise TunnelError(f"can't open a second ssh connection to {name}{error and f': {error}'}")

    def _command(self, name: str, *words: str) -> list[str]:
        number, machine = self._machines[name]
        # ssh expands % in this path.
        return ssh_command(machine, self._options, "-S", f"{self.folder}/{number}".replace("%", "%%"), *words)

    def forward_remote(self, name: str, to: str) -> int:
        """Forwards a free loopback port of machine `name` to the local end `to`; returns the port."""
        port = self._forward(name, "-R", f"{LOOPBACK}:0:{to}").strip()
        if not port.isdecimal():
            raise TunnelError(f"ssh to {name} did not report the number of the forwarded port, but {port!r}")
        return int(port)

    def forward_local(self, name: str, listen: str, to: str) -> None:
        """Forwards the local end `listen` to the end `to` on machine `name`. Does not test the connection."""
        self._forward(name, "-L", f"{listen}:{to}")

    def _forward(self, name: str, option: str, ends: str) -> str:
        command, null = self._command(name, "-O", "forward", option, ends), subprocess.DEVNULL
        try:
            done = subprocess.run(
                command, stdin=null, capture_output=True, text=True, timeout=TUNNEL_ASK_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise TunnelError(f"{name} did not answer a port forwarding request within {TUNNEL_ASK_S:.0f} s") from None
        if done.returncode:
            line = next(iter(done.stderr.splitlines()), "").rpartition("failed: ")[2]
            raise TunnelError(f"{name} refuses port forwarding (set AllowTcpForwarding yes in sshd_config): {line}")
        return done.stdout


class MachineTunnels(ChildProcesses):
    """The ssh tunnels that this machine has opened for one start, and the switchboard between workers and tunnels."""

    ends = TunnelEnds("", "")  # ends of the tunnels on this machine

    def __init__(self) -> None:
        super().__init__()
        self._until_closed = contextlib.ExitStack()

    def open(self, address: str) -> str:
        """Returns a new folder for the tunnels' sockets. Starts a switchboard on loopback `address` if it isn't ""."""
        self.close()
        self.folder = folder = self._until_closed.enter_context(scratch("way"))
        if not has_short_socket_paths(folder):
            hints = ("set a shorter path on this machine: export TMPDIR=/tmp",)
            raise RunError(f"the path {folder} is too long for Unix sockets", "TMPDIR", hints)
        self.ends = TunnelEnds(address, str(folder))
        if address:
            words = [sys.executable, "-P", "-m", switchboard.__name__, address, str(folder)]
            for error in self.start({"the switchboard": words}, SWITCHBOARD_S).values():
                raise RunError(f"can't start the process for ssh tunnels: {error}")
        return str(folder)

    def close(self) -> None:
        super().close()
        self._until_closed.close()
        self.ends = TunnelEnds("", "")
