"""Opens the conversation with an agent: on this machine over a pipe, on another over ssh."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from manyhands.cluster.inventory import Machine
from manyhands.cluster.link import Link
from manyhands.cluster.ssh import AGENT, agent_command
from manyhands.config.job import ClusterOptions

LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_here(log: Path, machine: Machine | None = None) -> Link:
    """Starts an agent on this machine."""
    return _open([sys.executable, "-m", AGENT], machine or Machine("localhost"), log, here=True)


def open_there(machine: Machine, options: ClusterOptions, log: Path) -> Link:
    """Starts an agent on another machine over ssh; whether that works shows when it is first asked."""
    return _open(agent_command(machine, options, Path.cwd()), machine, log, here=False)


def _open(command: list[str], machine: Machine, log: Path, *, here: bool) -> Link:
    """In a session of its own, so that Ctrl-C and the terminal's end reach only the head."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True
        )
    return Link(machine, process, log, here=here)


def is_here(machine: Machine) -> bool:
    """True when a host is this machine: a name of loopback, or an address that can be bound to."""
    if "@" in machine.host:
        return False  # another user's account, if it is here at all
    if machine.name in LOCAL_NAMES:
        return True
    try:
        found = socket.getaddrinfo(machine.name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
