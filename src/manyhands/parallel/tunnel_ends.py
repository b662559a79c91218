"""Where ssh tunnels end on a machine: a folder of Unix sockets, and an address of loopback for the machine's processes.

Each machine of a run has an address of loopback of its own, such as 127.84.19.2, on which its processes listen. On any
other machine of the run the same address leads there, once `reach` has asked for it: by the switchboard
(`cluster.agents.switchboard`), which the sockets of the folder belong to, and the tunnels that ssh makes between them.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from manyhands.core.errors import RunError

# Tells processes of the run their machine's own address and the folder.
VARIABLE = "MANYHANDS_TUNNELS"
ANSWER_S = 20.0
# What a Unix socket's path may have, its end counted.
LONGEST_PATH = 104


@dataclass(frozen=True)
class TunnelEnds:
    """The sockets of one machine."""

    address: str  # of loopback, that the machine's processes listen on
    folder: str  # that only this user may enter

    @property
    def entrance(self) -> str:
        """Where other machines' connections come in, two bytes with the port before them."""
        return f"{self.folder}/in"

    @property
    def questions(self) -> str:
        """Where a process asks for another machine's port."""
        return f"{self.folder}/ask"

    def towards(self, address: str) -> str:
        """Made by ssh: leads to the entrance of the machine with that address."""
        return f"{self.folder}/to-{address}"

    def environment(self) -> dict[str, str]:
        """What tells processes of it."""
        return {VARIABLE: f"{self.address} {self.folder}"}


def tunnel_ends() -> TunnelEnds | None:
    """Of this process's machine; None where its run needs no tunnels."""
    given = os.environ.get(VARIABLE, "")
    return TunnelEnds(*given.split(" ", 1)) if given else None


def reach(ends: TunnelEnds, address: str, port: int) -> None:
    """Lets another machine's port be reached on its address of loopback here.

    Raises:
        RunError: it can't be.
    """
    if address == ends.address:
        return
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(ANSWER_S)
        try:
            asked.connect(ends.questions)
            asked.sendall(f"{address} {port}\n".encode())
            answer = asked.makefile().readline().strip()
        except OSError as error:
            answer = str(error)
    if answer != "ok":
        raise RunError(f"can't reach {address} port {port} through ssh: {answer or 'the ssh tunnels are closed'}")


def fits(folder: Path) -> bool:
    """Whether sockets in a folder have paths that the system takes."""
    return len(os.fsencode(folder)) + len("/to-127.255.255.255") < LONGEST_PATH
