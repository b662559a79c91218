"""What of manyhands listens on this machine, and whether it lets anybody in."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

# An address that stands for all of a machine's own, and one of those.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
ANSWER_S = 0.5


@dataclass(frozen=True)
class OpenPort:
    """A port on which a process of manyhands listens."""

    address: str  # of this machine; 0.0.0.0 or :: for all of them
    port: int
    pid: int
    lets_in: bool  # whether a connection to it was answered just now


def open_ports() -> tuple[OpenPort, ...]:
    """Of this user's processes of manyhands and all that they have started, as far as the system lets us see them."""
    found = {(each.address, each.port): each for process in _processes() for each in _ports(process)}
    return tuple(found[place] for place in sorted(found))


def _processes() -> Iterable[psutil.Process]:
    ours: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(word == "manyhands" or word.startswith("manyhands.") or word.endswith("/manyhands") for word in words):
            try:
                ours |= {each.pid: each for each in (process, *process.children(recursive=True))}
            except psutil.Error:  # it has ended meanwhile
                continue
    return ours.values()


def _ports(process: psutil.Process) -> list[OpenPort]:
    try:
        found = [each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        return [OpenPort(place.ip, place.port, process.pid, _lets_in(place.ip, place.port)) for place in found]
    except psutil.Error:  # it has ended, or is another user's
        return []


def _lets_in(address: str, port: int) -> bool:
    try:
        socket.create_connection((EVERYWHERE.get(address, address), port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True
