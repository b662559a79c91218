"""The ends of ssh tunnels on a machine: a folder of Unix sockets, and the loopback address of its processes.

Each machine's processes listen on a loopback address of the machine, such as 127.84.19.2. Processes of other machines
call `request_tunnel`, then connect to this address through ssh and proxies (`cluster.agents.switchboard`).
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from manyhands.core.errors import RunError

VARIABLE = "MANYHANDS_TUNNELS"  # the environment variable with address and folder
ANSWER_S = 20.0
LONGEST_PATH = 104  # of a Unix socket, with the final NUL


@dataclass(frozen=True)
class TunnelEnds:
    """The paths of a machine's tunnel sockets, and its loopback address."""

    address: str  # the loopback address of the machine's processes
    folder: str  # only this user may enter it

    @property
    def in_socket(self) -> str:
        """Path of the socket for connections from other machines. Their first two bytes are the target port."""
        return f"{self.folder}/in"

    @property
    def request_socket(self) -> str:
        """Path of the socket to which `request_tunnel` sends its requests."""
        return f"{self.folder}/ask"

    def socket_to(self, address: str) -> str:
        """Returns the path of the socket that ssh forwards to `in_socket` of the machine with this loopback address."""
        return f"{self.folder}/to-{address}"

    def environment(self) -> dict[str, str]:
        return {VARIABLE: f"{self.address} {self.folder}"}


def tunnel_ends() -> TunnelEnds | None:
    """Returns this machine's tunnel ends from the environment, or None if the run has no tunnels."""
    given = os.environ.get(VARIABLE, "")
    return TunnelEnds(*given.split(" ", 1)) if given else None


def request_tunnel(ends: TunnelEnds, address: str, port: int) -> None:
    """Requests a tunnel to a port of the machine with loopback address `address`. Raises RunError if that fails."""
    if address == ends.address:
        return
    with socket.socket(socket.AF_UNIX) as request:
        request.settimeout(ANSWER_S)
        try:
            request.connect(ends.request_socket)
            request.sendall(f"{address} {port}\n".encode())
            answer = request.makefile().readline().strip()
        except OSError as error:
            answer = str(error)
    if answer != "ok":
        raise RunError(f"can't reach {address} port {port} through ssh: {answer or 'the ssh tunnels are closed'}")


def has_short_socket_paths(folder: Path) -> bool:
    return len(os.fsencode(folder)) + len("/to-127.255.255.255") < LONGEST_PATH
