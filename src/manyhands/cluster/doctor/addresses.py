"""Which address each machine is to be reached at: one that all the others did reach."""

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from manyhands.cluster.doctor.findings import Attempt, Facts

# The usual speeds of networks inside a machine mean nothing between machines.
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "lxd", "vmnet", "vboxnet", "podman")
TUNNELS = ("tun", "tap", "wg", "tailscale", "zt", "utun")


@dataclass(frozen=True)
class AddressCandidate:
    """One address of a machine."""

    interface: str  # its name
    address: str  # as text
    network: str  # the subnet, as text
    speed_mbps: int  # what the interface says of itself; 0 where it doesn't

    @property
    def version(self) -> int:
        return ipaddress.ip_address(self.address).version


def choose_addresses(
    facts: Mapping[str, Facts], reach: Mapping[tuple[str, str], Sequence[Attempt]]
) -> dict[str, tuple[str, str]]:
    """The interface and address of each machine that all reached who tried; a machine without one is left out.

    Where several would do: the same family on all machines (IPv4 first), no bridges for containers, no tunnels, the
    subnet that most machines share, private before public, the faster interface.
    """
    candidates = {host: list(_reached_candidates(host, facts, reach)) for host in facts}
    candidates = {host: found for host, found in candidates.items() if found}
    everywhere = [
        version for version in (4, 6) if all(any(c.version == version for c in found) for found in candidates.values())
    ]
    shared = Counter(network for found in candidates.values() for network in {c.network for c in found})

    def order(candidate: AddressCandidate) -> tuple[object, ...]:
        address = ipaddress.ip_address(candidate.address)
        return (
            candidate.version != everywhere[0] if everywhere else candidate.version,
            unlikely(candidate.interface),
            -shared[candidate.network],
            not address.is_private,
            -candidate.speed_mbps,
            candidate.network,
            candidate.address,
        )

    best = {host: min(found, key=order) for host, found in candidates.items()}
    return {host: (candidate.interface, candidate.address) for host, candidate in best.items()}


def local_candidates(facts: Facts) -> list[str]:
    """A machine's addresses that others might reach it at: those of interfaces that are up, without loopback."""
    return [address for _, address, _, _ in _addresses(facts)]


def unlikely(interface: str) -> int:
    """0 for an interface that machines are usually connected by, 1 for a tunnel, 2 for a containers' bridge."""
    if interface.startswith(VIRTUAL):
        return 2
    return 1 if interface.startswith(TUNNELS) else 0


def _reached_candidates(
    host: str, facts: Mapping[str, Facts], reach: Mapping[tuple[str, str], Sequence[Attempt]]
) -> Iterator[AddressCandidate]:
    tries = [reach[other, host] for other in facts if (other, host) in reach]
    for interface, address, network, speed in _addresses(facts[host]):
        if all(any(a.address == address and a.result == "ok" for a in tried) for tried in tries):
            yield AddressCandidate(interface, address, network, speed)


def _addresses(facts: Facts) -> Iterator[tuple[str, str, str, int]]:
    for interface in facts.get("interfaces", ()):
        for entry in interface.get("addresses", ()) if interface.get("up") else ():
            address = ipaddress.ip_address(entry["address"])
            # A link-local address means nothing without the interface that it is seen from.
            if not (address.is_loopback or address.is_link_local or address.is_unspecified):
                network = ipaddress.ip_network(f"{address}/{entry['prefix']}", strict=False)
                yield str(interface["name"]), str(address), str(network), int(interface.get("speed_mbps") or 0)
