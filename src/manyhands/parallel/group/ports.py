"""Listening sockets, network interfaces, and messages about the hosts that can reach a port."""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable

import psutil

from manyhands.core.errors import UserError

# Prefixes of addresses that other machines can't reach: bridges of containers and virtual machines, and link-local.
INNER_NETWORKS = ("172.17.", "192.168.122.", "169.254.", "fe80:")


class PortTakenError(UserError):
    """Raised if another process already listens on the port."""


def listen(host: str, port: int, option_name: str = "--init") -> socket.socket:
    """Listens on one address of this machine, whereas torch's store would listen on every interface.

    `option_name` is the option that sets the address. Raises UserError if it isn't this machine's or the port is taken.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        what = f"the name {host} has no address: {error.strerror}"
        raise UserError(what, option_name, ("give an IP address",)) from None
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise _listen_error(host, port, error, option_name) from None
    return listener


def _listen_error(host: str, port: int, error: OSError, option_name: str) -> UserError:
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        hints = (f"choose another port on every process, such as {port + 1}", "or end that process")
        return PortTakenError(f"port {port} is in use{holder and f' by {holder}'}", option_name, hints)
    if error.errno == errno.EADDRNOTAVAIL:
        what = f"{host} is not an address of this machine (it has {', '.join(local_addresses())})"
        hints = ("run rank 0 on the machine with that address", "or correct the --rank of this process")
        return UserError(what, option_name, hints)
    return UserError(f"can't listen on {host}:{port}: {error.strerror}", option_name, ("choose a port above 1024",))


def port_holder(port: int) -> str:
    """Describes the process that listens on a port: PID, name and user. Returns "" if this user can't see it."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
            try:
                process = psutil.Process(connection.pid)
                return f"process {process.pid} ({process.name()}, user {process.username()})"
            except psutil.Error:
                return f"process {connection.pid}"
    return ""


def _interfaces() -> list[tuple[str, str, str | None]]:
    """Returns (interface name, address, netmask) of each IPv4 and IPv6 address of this machine."""
    return [
        (name, entry.address.partition("%")[0], entry.netmask)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in {socket.AF_INET, socket.AF_INET6}
    ]


def _interface_with(address: str) -> str:
    return next((name for name, mine, _ in _interfaces() if mine == address), "")


def local_addresses() -> list[str]:
    """Returns the IPv4 and IPv6 addresses of this machine, loopback last."""
    found = [address for _, address, _ in _interfaces()]
    return sorted(found, key=lambda text: (text.startswith(("127.", "::1")), ":" in text, text))


def reachable_addresses() -> list[str]:
    """Returns the addresses of this machine that other machines may reach: not loopback, bridges or link-local."""
    return [one for one in local_addresses() if not _is_loopback(one) and not one.startswith(INNER_NETWORKS)]


def loopback_interface() -> str:
    """Returns the name of the interface with address 127.0.0.1, such as "lo" on Linux and "lo0" on macOS."""
    return _interface_with("127.0.0.1") or "lo"


def route_interface(host: str) -> str:
    """Returns the name of the interface through which this machine reaches `host`. Returns "" without a route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return _interface_with(probe.getsockname()[0])
    except OSError:
        return ""


def interface_to_addresses(addresses: Iterable[str]) -> str:
    """Returns the interface in the network of one of the addresses, or of the route to one, or "" without a route."""
    wanted = [ipaddress.ip_address(address) for address in addresses]
    mine = set(reachable_addresses())
    for name, own, netmask in _interfaces():
        if own in mine and netmask:
            network = ipaddress.ip_network(f"{own}/{int(ipaddress.ip_address(netmask)).bit_count()}", strict=False)
            if any(address in network for address in wanted):
                return name
    return next(filter(None, (route_interface(str(address)) for address in wanted)), "")


def require_interfaces(names: str, option_name: str) -> None:
    """Raises UserError if this machine lacks one of the interfaces in the comma-separated list `names`."""
    mine = psutil.net_if_addrs()
    for name in names.split(","):
        if name not in mine:
            what = f'{option_name} names "{name}", but this machine has the interfaces {", ".join(sorted(mine))}'
            raise UserError(what, option_name, (f"unset {option_name}", "or name one of these interfaces"))


def describe_collective_ports(interface: str) -> str:
    """Returns a message that names the addresses on which collectives listen, and the hosts that can connect."""
    entries = _interfaces()
    found = [
        address
        for one in interface.split(",")
        for name, address, _ in entries
        if name == one and not address.startswith("fe80:")
    ]
    where = f"{interface} ({', '.join(found)})" if found else interface or "an interface chosen by the backend"
    return (
        f"collectives listen on free ports of {where}: open to every host that can reach that address, "
        "without a password or encryption"
    )


def describe_launcher_ports(name: str) -> list[str]:
    """Returns [message] if other machines can reach ports of the launcher (parent process) `name`, otherwise []."""
    try:
        connections = psutil.Process(os.getppid()).net_connections("tcp")
    except psutil.Error:
        return []
    listening = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN]
    outer = sorted({(address.ip, address.port) for address in listening if not _is_loopback(address.ip)})
    if not outer:
        return []
    numbers = " and ".join(str(port) for port in sorted({port for _, port in outer}))
    every = all(ip in {"0.0.0.0", "::"} for ip, _ in outer)
    where = "on every interface" if every else f"on {', '.join(sorted({ip for ip, _ in outer}))}"
    return [f"{name} itself listens {where}, port {numbers}: open to every host that can connect, without a password"]


def _is_loopback(address: str) -> bool:
    mapped = getattr(ipaddress.ip_address(address), "ipv4_mapped", None)
    return (mapped or ipaddress.ip_address(address)).is_loopback


def describe_reachability(host: str, port: int) -> str:
    """Returns a message that says which hosts can reach a port on which this process listens."""
    if host in {"0.0.0.0", "::"}:
        return (
            f"port {port} is open on every interface ({', '.join(local_addresses())}): every host that can connect can "
            "join or disturb this run; name the address of one interface to restrict access"
        )
    if host.startswith("127.") or host in {"localhost", "::1"}:
        return f"port {port} is open to all users of this machine, on loopback only"
    return f"port {port} is open on {host} to every host that can reach that address, without a password or encryption"
