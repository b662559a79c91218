"""Blocks new connections to the sockets of gloo and of the store once all processes have connected. Linux only.

gloo listens as long as a group exists, so any host could exhaust the process's file descriptors. A socket filter that
drops all packets prevents that: existing connections stay, and new connections get no answer.
"""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path

from manyhands.parallel.group.ports import local_addresses
from manyhands.parallel.group.tunnel_ends import tunnel_ends

SO_ATTACH_FILTER = 26
DROP_ALL_PACKETS = struct.pack("HBBI", 0x06, 0, 0, 0)  # a BPF program of one instruction: pass 0 bytes
OPEN_FILES = Path("/proc/self/fd")


def tcp_sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yields (name, duplicate) of each TCP socket of this process. Each duplicate is closed after its iteration."""
    for path in OPEN_FILES.iterdir() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            name = str(path.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as found:
                    if found.type == socket.SOCK_STREAM and found.family in {socket.AF_INET, socket.AF_INET6}:
                        yield name, found


def is_listening(tcp_socket: socket.socket) -> bool:
    return bool(tcp_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _block_new_connections(listener: socket.socket) -> None:
    code = ctypes.create_string_buffer(DROP_ALL_PACKETS)
    # In a sandbox without filters the port stays open, as `doctor --exposure` reports.
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))


@contextlib.contextmanager
def block_listeners_on_exit(backend: str = "") -> Generator[None]:
    """When the context exits, blocks new connections to the sockets that gloo opened in it. NCCL's stay open."""
    later = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in {"", "0"}  # connects when first needed
    # Through ssh all groups of a process share one listening socket, on loopback only.
    if "gloo" not in backend or "," in backend or later or tunnel_ends():
        yield
        return
    before = {name for name, one in tcp_sockets() if is_listening(one)}
    yield
    for name, one in tcp_sockets():
        if name not in before and is_listening(one):
            _block_new_connections(one)


def close_rendezvous(port: int, machines: Sequence[Collection[str]]) -> None:
    """Blocks new connections to the store's port after the rendezvous, and disconnects hosts outside the run.

    Called on the process that holds the store. `machines` has the addresses of each other machine. If a machine is not
    connected from one of its addresses, it may use an unlisted address, so no host is disconnected.
    """
    own, theirs = [], []
    for _, one in tcp_sockets():
        if one.getsockname()[1] == port:
            (own if is_listening(one) else theirs).append(one.dup())
    try:
        for listener in own:
            _block_new_connections(listener)
        seen = {_peer_address(other) for other in theirs}
        known = {*local_addresses(), *(address for machine in machines for address in machine)}
        for other in theirs if all(seen.intersection(machine) for machine in machines) else ():
            if _peer_address(other) not in known:
                other.shutdown(socket.SHUT_RDWR)
    finally:
        for one in (*own, *theirs):
            one.close()


def _peer_address(tcp_socket: socket.socket) -> str:
    return tcp_socket.getpeername()[0].removeprefix("::ffff:").partition("%")[0]
