"""Who takes part in a start of a run, and where: in words for the user, and in machines.json."""

from collections.abc import Sequence

from manyhands.cluster.agents.assemble import AgentLinks
from manyhands.cluster.agents.open_tunnels import TunnelRoutes
from manyhands.cluster.agents.protocol import RunOpened
from manyhands.cluster.agents.store_tunnel import StorePlaces
from manyhands.cluster.hosts.inventory import Address
from manyhands.core.records import write_json
from manyhands.core.run_folder import RunFolder


def describe(
    agents: AgentLinks,
    sizes: Sequence[int],
    addresses: Sequence[Address],
    places: StorePlaces,
    through_ssh: TunnelRoutes | None = None,
) -> list[str]:
    """Who takes part, and what listens where."""
    names = [link.machine.name for link in agents.links]
    who = ", ".join(f"{name} ({size})" if size > 1 else name for name, size in zip(names, sizes, strict=True))
    total = sum(sizes)
    lines = [f"{total} process{'es' if total > 1 else ''} on {who}"]
    if len(agents.links) == 1 or all(link.here for link in agents.links):
        return lines
    if through_ssh:
        return [*lines, through_ssh.summary()]
    where = ", ".join(
        f"{name} {address.address} ({address.interface})" for name, address in zip(names, addresses, strict=True)
    )
    first = addresses[0].address
    if places.why_open:
        lines.append(
            f"{places.why_open}; so the store listens on {first} port {places.ends[0][1]}, open without a password to "
            "every host that reaches the port"
        )
    lines.append(
        f"network: {where}; {'' if places.why_open else 'the store listens on loopback only, through ssh; '}"
        "each process listens on free ports of its machine's address, open without a password to every host that "
        "reaches the ports; gradients are sent unencrypted"
    )
    return lines


def write_places(
    folder: RunFolder,
    agents: AgentLinks,
    sizes: Sequence[int],
    addresses: Sequence[Address],
    opened: Sequence[RunOpened],
) -> None:
    """machines.json: who has which ranks, and where its part of the run folder is."""
    firsts = [sum(sizes[:machine]) for machine in range(len(sizes))]
    write_json(
        folder.machines,
        [
            {"host": link.machine.host, "port": link.machine.port, "here": link.here,
             "local": link.here or answer.shared, "ranks": [first, size], "folder": answer.folder,
             "address": address.address, "interface": address.interface}
            for link, first, size, answer, address in zip(agents.links, firsts, sizes, opened, addresses, strict=True)
        ],
    )  # fmt: skip
