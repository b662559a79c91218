"""A model of the time of collectives, based on the latency and the bandwidth of a link.

For p processes in a ring, an all-reduce is a reduce-scatter and an all-gather of p - 1 messages each, of a p-th of the
bytes (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). gloo and NCCL
do the same with long messages.
"""

from dataclasses import dataclass, replace

from manyhands.core.quantities import parse_bandwidth

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class LinkSpeed:
    """Bandwidth and latency of a link between two processes, and the CPU time that its use takes."""

    bytes_per_s: float  # in one direction, with long messages
    latency_s: float  # until the first byte of a message arrives
    work_s_per_byte: float = 0.0  # seconds in which a process's cores are busy per byte sent
    work_s_per_message: float = 0.0  # seconds in which they are busy per message


# Tensors pass through memory within a machine; between machines Gigabit Ethernet is assumed.
WITHIN_A_MACHINE = LinkSpeed(4e9, 20e-6)
BETWEEN_MACHINES = LinkSpeed(125e6, 100e-6)
_PAYLOAD = 0.956  # without the headers of Ethernet, IP and TCP: 1448 of 1514 bytes
# Largest throughput of ssh and the latency it adds, measured (docs/experiments/through-ssh.md)
_SSH = LinkSpeed(2.2e8, 300e-6)


def parse_link(text: str, where: str = "--link") -> LinkSpeed:
    """Returns the speed of a link with a nominal bandwidth such as "10mbit". Raises UserError if `text` is invalid."""
    return LinkSpeed(parse_bandwidth(text, where) * _PAYLOAD, BETWEEN_MACHINES.latency_s)


def link_through_ssh(link: LinkSpeed) -> LinkSpeed:
    return replace(link, bytes_per_s=min(link.bytes_per_s, _SSH.bytes_per_s), latency_s=link.latency_s + _SSH.latency_s)


def rounds(kind: str, processes: int) -> tuple[int, float]:
    """Returns (number of sequential messages, bytes that each process sends per byte of the tensor) of a collective.

    The tensor is the full one that is reduced, gathered or scattered, or for all_to_all the input of one process.
    """
    ring = processes - 1
    if processes == 1:
        return 0, 0.0
    if kind == "all_reduce":
        return 2 * ring, 2 * ring / processes
    return ring, ring / processes


def sent_bytes(kind: str, processes: int, size_bytes: float) -> float:
    return size_bytes * rounds(kind, processes)[1]


def link_seconds(kind: str, processes: int, size_bytes: float, link: LinkSpeed) -> float:
    messages, share = rounds(kind, processes)
    sending_s = messages * link.latency_s + share * size_bytes / link.bytes_per_s
    return max(sending_s, work_seconds(kind, processes, size_bytes, link))


def work_seconds(kind: str, processes: int, size_bytes: float, link: LinkSpeed) -> float:
    """Returns the seconds in which a collective keeps the CPU cores of a process busy."""
    messages, share = rounds(kind, processes)
    return messages * link.work_s_per_message + share * size_bytes * link.work_s_per_byte


def fit_link_speed(kind: str, processes: int, points: Points) -> LinkSpeed:
    """Fits a link speed to the first and last (bytes, seconds) of a collective; latency 0 if the last wasn't slower."""
    (small, first_s), (large, last_s) = points[0], points[-1]
    messages, share = rounds(kind, processes)
    if messages == 0 or share * large == 0 or last_s <= 0:
        raise ValueError(f"can't compute a link speed from {kind} over {processes} processes with {large} bytes")
    if last_s <= first_s or large <= small:
        return LinkSpeed(share * large / last_s, 0.0)
    bytes_per_s = share * (large - small) / (last_s - first_s)
    return LinkSpeed(bytes_per_s, max(0.0, first_s - share * small / bytes_per_s) / messages)
