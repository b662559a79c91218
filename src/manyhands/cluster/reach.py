"""Interim."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    interface: str
    address: str

    def environment(self):
        return {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}


def find_addresses(crew, options):
    if all(link.here for link in crew.links):
        return [Address("lo", "127.0.0.1") for _ in crew.links]
    return [Address("eth0", f["addresses"]["eth0"]) for f in crew.facts]
