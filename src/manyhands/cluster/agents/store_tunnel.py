"""How the machines of a run come to their store: it listens on loopback of the first, and ssh leads to it.

Where ssh forwards nothing, it listens on the first machine's address between the machines, as the collectives do.
"""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manyhands.cluster.agents.assemble import AgentLinks
from manyhands.cluster.agents.protocol import Bind
from manyhands.cluster.agents.tunnel import LOOPBACK, SshTunnels, TunnelError
from manyhands.cluster.doctor.questions import Connect, Listen, Listener, Unlisten
from manyhands.cluster.hosts.inventory import Address
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import RunError
from manyhands.core.scratch import scratch
from manyhands.core.timeouts import STORE_CONNECT_S, STORE_S


@dataclass(frozen=True)
class StorePlaces:
    """Where each machine's processes find the store of one start."""

    ends: tuple[tuple[str, int], ...]  # address and port for each machine, in the order of ranks
    why_open: str = ""  # why it doesn't listen on loopback alone; empty where it does


class StoreTunnel:
    """Ways to the store, which are made anew for each start of a run."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._of_this_start = contextlib.ExitStack()

    def open(self, agents: AgentLinks, addresses: Sequence[Address]) -> StorePlaces:
        """Has the first machine listen for the store, and the others reach it.

        Args:
            agents: the machines' agents.
            addresses: where the others reach each.

        Raises:
            RunError: a machine is lost.
        """
        self.close()
        first = agents.links[0]
        if len(agents.links) == 1:
            return StorePlaces(((LOOPBACK, first.ask(Bind(LOOPBACK), STORE_S).port),))
        try:
            return StorePlaces(self._through_ssh(agents, addresses))
        except TunnelError as error:
            self.close()
            address = addresses[0].address
            port = first.ask(Bind(address), STORE_S, agents.links).port
            return StorePlaces(((address, port),) * len(agents.links), str(error))

    def _through_ssh(self, agents: AgentLinks, addresses: Sequence[Address]) -> tuple[tuple[str, int], ...]:
        def heartbeat() -> None:
            for link in agents.links:
                link.heartbeat()

        first, others = agents.links[0], agents.links[1:]
        folder = self._of_this_start.enter_context(scratch("ssh", swept=True))
        far = [link.machine for link in agents.links if not link.here]
        tunnels = self._of_this_start.enter_context(
            contextlib.closing(SshTunnels(far, self._options, folder, heartbeat))
        )
        # The very way is tried, with somebody at its end who knows a word, before the store takes that port.
        (ear,) = first.ask(Listen((LOOPBACK,), seconds=STORE_S), STORE_S, agents.links).listeners
        store = via = f"{LOOPBACK}:{ear.port}"
        if not first.here:
            via = str(folder / "store")
            tunnels.here(first.machine.name, via, store)
        ends = {first: ear.port}
        for link in others:
            heartbeat()
            ends[link] = _free_port() if link.here else tunnels.there(link.machine.name, via)
            if link.here:
                tunnels.here(first.machine.name, f"{LOOPBACK}:{ends[link]}", store)
        places = dict(zip(agents.links, addresses, strict=True))
        asked = {link.machine.name: _reach(ends[link], places[link].address, ear.token) for link in others}
        for name, answer in agents.ask_some(asked, STORE_S).items():
            if isinstance(answer, RunError):
                raise answer
            _refuse_open(name, *(attempt.result for attempt in answer.attempts))
        first.ask(Unlisten(), STORE_S, agents.links)
        first.ask(Bind(LOOPBACK, ear.port), STORE_S, agents.links)
        return tuple((LOOPBACK, ends[link]) for link in agents.links)

    def close(self) -> None:
        """Ends the ways of the last start."""
        self._of_this_start.close()


@contextlib.contextmanager
def store_tunnel(options: ClusterOptions) -> Iterator[StoreTunnel]:
    """A way to the store that goes with the block."""
    way = StoreTunnel(options)
    try:
        yield way
    finally:
        way.close()


def _reach(port: int, address: str, token: str) -> Connect:
    """Loopback, and the machine's address for others, which must lead nowhere."""
    return Connect((Listener(LOOPBACK, port, token), Listener(address, port, token)), STORE_CONNECT_S)


def _refuse_open(name: str, loopback: str, outside: str) -> None:
    if loopback != "ok":
        raise TunnelError(f"ssh port forwarding to {name} does not work (check PermitOpen in sshd_config)")
    if outside == "ok":
        raise TunnelError(f"the ssh server of {name} exposes forwarded ports (set GatewayPorts no in sshd_config)")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
