"""Which of a cluster's machines this one is, and on which of its addresses the others can reach it."""

import ipaddress
import socket
from collections.abc import Collection

from manyhands.cluster.hosts.inventory import Cluster, Machine, is_address
from manyhands.core.errors import UserError
from manyhands.parallel.ports import local_addresses, outer_addresses


def find_machine(cluster: Cluster) -> int:
    """This machine's place in the cluster: as described, or by its names and addresses. Raises UserError: not one."""
    if cluster.machine is not None:
        return cluster.machine
    names, mine = [machine.address for machine in cluster.machines], set(local_addresses())
    here = [place for place, name in enumerate(names) if is_local_name(name, mine)]
    here = here or [place for place, name in enumerate(names) if _resolves_to(mine, name)]
    if len(here) == 1:
        return here[0]
    own = f"host name {socket.gethostname()}, addresses {', '.join(outer_addresses()) or 'only loopback'}"
    found = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    if not here:
        what = f"this machine ({own}) is not in the list of machines: {found}"
        raise UserError(what, cluster.source, ("add one of this machine's names or addresses to the list",))
    twice = " and ".join(names[place] for place in here)
    what = f"this machine ({own}) is listed {len(here)} times: {twice}"
    raise UserError(what, cluster.source, ("keep only one of these entries",))


def is_here(machine: Machine) -> bool:
    """True when a host that the user names is this machine: its name or address is, or means, one of this machine's."""
    if "@" in machine.host or machine.port:
        return False  # another user's account, or a container or a tunnel, if it is here at all
    own = set(local_addresses())
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in _resolve(machine.address))


def is_local_name(name: str, addresses: Collection[str]) -> bool:
    """True for this machine's addresses and names, as far as they are known without asking a name server."""
    if is_address(name):
        return name in addresses
    mine = socket.gethostname().lower()
    if "." in name and "." in mine:
        return name.lower() == mine
    return name == "localhost" or _short(name) == _short(mine)


def reachable(address: str) -> str:
    """An address of this machine instead of a name that means loopback here (Debian writes 127.0.1.1 for the own name).

    Other machines' names and addresses are returned as they are. Raises UserError: it is loopback, or stands for it and
    this machine has several addresses or none.
    """
    if address in {"0.0.0.0", "::"}:
        return address
    if address == "localhost" or (is_address(address) and ipaddress.ip_address(address).is_loopback):
        what = f"the processes are on several machines, but {address} is a loopback address"
        hints = ("set MASTER_ADDR to an address of rank 0's machine that all machines can reach",)
        raise UserError(what, "MASTER_ADDR", hints)
    if is_address(address) or not _means_loopback(address):
        return address
    candidates = [found for found in outer_addresses() if ":" not in found] or outer_addresses()
    if len(candidates) == 1:
        return candidates[0]
    has = f"has the addresses {' and '.join(candidates)}" if candidates else "has no other address"
    raise UserError(
        f"the name {address} resolves to loopback on this machine, which {has}; other machines can't reach rank 0",
        "/etc/hosts",
        (
            f"in /etc/hosts, map {address} to the address that the other machines reach",
            "or set MASTER_ADDR to the address that the other machines reach",
        ),
    )


def seen_by_others(address: str) -> str:
    """As `reachable`, but what says itself that it is loopback stays so: processes of one machine may meet there."""
    if address == "localhost" or (is_address(address) and ipaddress.ip_address(address).is_loopback):
        return address
    return reachable(address)


def _resolves_to(own: Collection[str], name: str) -> bool:
    return any(address in own and not ipaddress.ip_address(address).is_loopback for address in _resolve(name))


def _means_loopback(name: str) -> bool:
    found = _resolve(name)
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def _resolve(name: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []  # a name that only other machines know, or none at all
    return [str(entry[4][0]).partition("%")[0] for entry in entries]


def _short(name: str) -> str:
    return name.partition(".")[0].lower()
