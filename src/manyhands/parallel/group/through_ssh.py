"""Gloo between machines that are connected through ssh. It listens only on the tunnels' loopback addresses.

torch has no public way to choose gloo's address, so ProcessGroupGloo is replaced. All groups of a process share a port.
"""

from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, cast

import psutil
import torch.distributed as dist

from manyhands.core.errors import PeerError
from manyhands.core.files import parse_count
from manyhands.parallel.group.tunnel_ends import TunnelEnds, request_tunnel, tunnel_ends

_Gloo: Any = dist.ProcessGroupGloo  # torch's types lack the class's options and devices


class GlooThroughSsh(_Gloo):
    """A gloo group of processes on machines that are connected through ssh."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        ends = tunnel_ends()
        assert ends is not None
        device, port = _gloo_device(ends)
        addresses = dist.PrefixStore("through-ssh", store)
        addresses.set(str(rank), f"{ends.address}:{port}")
        for other in range(size):
            request_tunnel(ends, *_parse_address(addresses.get(str(other)), other))
        options = _Gloo._Options()
        options._devices, options._timeout = [device], timeout
        super().__init__(store, rank, size, options)


def _parse_address(published: bytes, rank: int) -> tuple[str, int]:
    with suppress(UnicodeDecodeError):
        address, _, port = published.decode().partition(":")
        if number := parse_count(port):
            return address, number
    raise PeerError(f"rank {rank} published an invalid address")


@cache
def _gloo_device(ends: TunnelEnds) -> tuple[Any, int]:
    """Creates gloo's device, which listens on the tunnels' address. Returns (device, port chosen by gloo)."""
    before = _listening_ports(ends.address)
    device = _Gloo.create_device(hostname=ends.address)
    (port,) = _listening_ports(ends.address) - before
    return device, port


def _listening_ports(address: str) -> set[int]:
    found = psutil.Process().net_connections("tcp4")
    return {entry.laddr.port for entry in found if entry.status == psutil.CONN_LISTEN and entry.laddr.ip == address}


def route_gloo_through_tunnels() -> bool:
    """Makes all gloo groups created from now on use the run's ssh tunnels. Returns False if the run has none."""
    if tunnel_ends() is None:
        return False
    cast(Any, dist.distributed_c10d).ProcessGroupGloo = GlooThroughSsh
    return True
