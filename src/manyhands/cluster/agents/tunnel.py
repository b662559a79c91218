"""Forwards over the system's own ssh: what listens on loopback of one machine is reached on loopback of another.

    tunnels = SshTunnels(machines, options, folder, lambda: None)   # one connection to each, all begun at once
    port = tunnels.there("n2", "127.0.0.1:5000")    # who connects to loopback's `port` on n2 comes to 5000 here
    tunnels.here("n2", f"{folder}/x", "127.0.0.1:7")  # who opens that socket here comes to port 7 of n2's loopback
    tunnels.close()                                 # no process, port or socket is left

A place is ADDRESS:PORT, or the path of a Unix socket, which is this user's alone. A head uses it towards its machines,
and an agent may towards others that it can log in to. Each connection is a process of its own beside the agent's, so
bulk doesn't keep heartbeats waiting; it ends with whoever made it, also where that is killed, once nobody uses what it
forwards.
"""

import contextlib
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manyhands.cluster.agents.ssh import port_words, ssh_words
from manyhands.cluster.hosts.inventory import Machine
from manyhands.config.job import ClusterOptions
from manyhands.core.timeouts import TUNNEL_ASK_S, TUNNEL_CLOSE_S, TUNNEL_OPEN_S

LOOPBACK = "127.0.0.1"
# Ends with its standard input, so that nothing stays once its owner is gone; a csh understands it too.
_STAY = "echo ready; exec cat"


class TunnelError(Exception):
    """There is no way through ssh to a machine; why, in a sentence."""


class SshTunnels:
    """Connections over ssh that carry forwards, by the machine's name.

    Args:
        machines: where they lead.
        options: of the cluster.
        folder: a short path that only this user can enter, for their sockets.
        meanwhile: called a few times a second while they are opened.

    Raises:
        TunnelError: one can't be opened; none is left.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        options: ClusterOptions,
        folder: Path,
        meanwhile: Callable[[], object],
    ) -> None:
        self._words, self._folder = ssh_words(options), folder
        self._machines = {machine.name: machine for machine in machines}
        self._logs = {name: folder / f"{number}.log" for number, name in enumerate(self._machines)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name in self._machines:
                self._processes[name] = self._open(name)
            until = time.monotonic() + TUNNEL_OPEN_S
            for name, process in self._processes.items():
                self._wait(name, process, until, meanwhile)
        except BaseException:
            self.close()
            raise

    def _command(self, name: str, *words: str) -> list[str]:
        machine = self._machines[name]
        # ssh replaces what follows a % in this path.
        socket = str(self._logs[name].with_suffix("")).replace("%", "%%")
        return [*self._words, "-S", socket, *words, *port_words(machine), "--", machine.host]

    def _open(self, name: str) -> subprocess.Popen[bytes]:
        own = ("-o", "ControlMaster=yes", "-o", "ControlPersist=no", "-o", "ClearAllForwardings=yes", "-a", "-x")
        with self._logs[name].open("wb") as log:
            return subprocess.Popen(
                [*self._command(name, *own), _STAY],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _wait(self, name: str, process: subprocess.Popen[bytes], until: float, meanwhile: Callable[[], object]) -> None:
        assert process.stdout is not None
        # A login shell may greet first.
        while time.monotonic() < until:
            meanwhile()
            if select.select([process.stdout], [], [], 0.2)[0]:
                line = process.stdout.readline()
                if line == b"ready\n":
                    return
                if not line:
                    break
        raise TunnelError(f"can't open a second ssh connection to {name}{self._said(name)}")

    def _said(self, name: str) -> str:
        lines = self._logs[name].read_text(errors="replace").splitlines()
        return f": {lines[-1]}" if lines else ""

    def there(self, name: str, to: str) -> int:
        """Has a free port of the machine's loopback lead to a place here; gives the port.

        Raises:
            TunnelError: the machine's ssh server doesn't forward.
        """
        said = self._forward(name, "-R", f"{LOOPBACK}:0:{to}").strip()
        if not said.isdecimal():
            raise TunnelError(f"ssh to {name} did not report the forwarded port: {said!r}")
        return int(said)

    def here(self, name: str, listen: str, to: str) -> None:
        """Has a place here lead to one of the machine's. That the machine's ssh server allows it shows when it is used.

        Raises:
            TunnelError: nothing can listen here.
        """
        self._forward(name, "-L", f"{listen}:{to}")

    def _forward(self, name: str, way: str, what: str) -> str:
        try:
            done = subprocess.run(
                self._command(name, "-O", "forward", way, what),
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TUNNEL_ASK_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TunnelError(f"{name} did not answer a port forwarding request within {TUNNEL_ASK_S:.0f} s") from None
        if done.returncode:
            line = next(iter(done.stderr.splitlines()), "").rpartition("failed: ")[2]
            raise TunnelError(f"{name} refuses port forwarding (set AllowTcpForwarding yes in sshd_config): {line}")
        return done.stdout

    def close(self) -> None:
        """Ends all connections, and with them what they forward."""
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.terminate()
        until = time.monotonic() + TUNNEL_CLOSE_S
        for process in self._processes.values():
            assert process.stdout is not None
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._processes.clear()
        for path in self._folder.iterdir():
            if path.is_socket():
                path.unlink()
