"""Selects the address that each machine is reached at: one that all the others did reach."""

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from manyhands.cluster.doctor.findings import Attempt, Facts

# The usual speeds of networks inside a machine mean nothing between machines.
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "lxd", "vmnet", "vboxnet", "podman")
TUNNELS = ("tun", "tap", "wg", "tailscale", "zt", "utun")


class AddressCandidate(NamedTuple):
    """One address of a machine."""

    interface: str  # its name
    address: str  # as text
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address
    network: str  # the subnet, as text
    speed_mbps: int  # as the interface reports it; 0 where it doesn't


def choose_addresses(
    facts: Mapping[str, Facts], reach: Mapping[tuple[str, str], Sequence[Attempt]]
) -> dict[str, tuple[str, str]]:
    """The interface and address of each machine that all reached who tried; a machine without one is left out.

    Where several would do: the same family on all machines (IPv4 first), no bridges for containers, no tunnels, the
    subnet that most machines share, private before public, the faster interface.
    """
    candidates: dict[str, list[AddressCandidate]] = {}
    for host in facts:
        tries = [reach[other, host] for other in facts if (other, host) in reach]
        reached = [{attempt.address for attempt in tried if attempt.result == "ok"} for tried in tries]
        found = [each for each in _candidates(facts[host]) if all(each.address in addresses for addresses in reached)]
        if found:
            candidates[host] = found
    families = [{each.ip.version for each in found} for found in candidates.values()]
    everywhere = [version for version in (4, 6) if all(version in family for family in families)]
    shared = Counter(network for found in candidates.values() for network in {each.network for each in found})

    def order(candidate: AddressCandidate) -> tuple[object, ...]:
        return (
            candidate.ip.version != everywhere[0] if everywhere else candidate.ip.version,
            unlikely(candidate.interface),
            -shared[candidate.network],
            not candidate.ip.is_private,
            -candidate.speed_mbps,
            candidate.network,
            candidate.address,
        )

    best = {host: min(found, key=order) for host, found in candidates.items()}
    return {host: (candidate.interface, candidate.address) for host, candidate in best.items()}


def local_candidates(facts: Facts) -> list[str]:
    """A machine's addresses that others might reach it at: those of interfaces that are up, without loopback."""
    return [candidate.address for candidate in _candidates(facts)]


def unlikely(interface: str) -> int:
    """0 for an interface that machines are usually connected by, 1 for a tunnel, 2 for a containers' bridge."""
    if interface.startswith(VIRTUAL):
        return 2
    return 1 if interface.startswith(TUNNELS) else 0


def _candidates(facts: Facts) -> Iterator[AddressCandidate]:
    for interface in facts.get("interfaces", ()):
        for entry in interface.get("addresses", ()) if interface.get("up") else ():
            ip = ipaddress.ip_address(entry["address"])
            # A link-local address means nothing without the interface that it is seen from.
            if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified):
                network = str(ipaddress.ip_network(f"{ip}/{entry['prefix']}", strict=False))
                yield AddressCandidate(interface["name"], str(ip), ip, network, interface.get("speed_mbps") or 0)
