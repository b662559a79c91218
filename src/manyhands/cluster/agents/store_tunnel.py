"""How the machines of a run come to their store: it listens on loopback of the first, and ssh leads to it.

Where ssh forwards nothing, it listens on the first machine's address between the machines, as the collectives do.
"""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.assemble import AgentLinks
from manyhands.cluster.agents.tunnel import SshTunnels, TunnelError
from manyhands.cluster.doctor.findings import Attempt
from manyhands.cluster.doctor.probe import Listener
from manyhands.cluster.hosts.inventory import LOOPBACK, Address
from manyhands.cluster.messages import Request, call
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import RunError
from manyhands.core.scratch import scratch
from manyhands.core.timeouts import STORE_CONNECT_S, STORE_S


@dataclass(frozen=True)
class StorePlaces:
    """Where each machine's processes find the store of one start."""

    ends: tuple[tuple[str, int], ...]  # address and port for each machine, in the order of ranks
    why_open: str = ""  # why it doesn't listen on loopback alone; empty where it does


class StoreTunnel(contextlib.ExitStack):
    """Tunnels to the store, which are made anew for each start of a run; closed with the block."""

    def __init__(self, options: ClusterOptions) -> None:
        super().__init__()
        self._options = options

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
            return StorePlaces(((LOOPBACK, first.ask(call(Agent.bind, LOOPBACK), STORE_S)),))
        try:
            return StorePlaces(self._through_ssh(agents, addresses))
        except TunnelError as error:
            self.close()
            address = addresses[0].address
            port = first.ask(call(Agent.bind, address), STORE_S, agents.links)
            return StorePlaces(((address, port),) * len(agents.links), str(error))

    def _through_ssh(self, agents: AgentLinks, addresses: Sequence[Address]) -> tuple[tuple[str, int], ...]:
        first, others = agents.links[0], agents.links[1:]
        folder = self.enter_context(scratch("ssh", swept=True))
        far = [link.machine for link in agents.links if not link.here]
        tunnels = self.enter_context(contextlib.closing(SshTunnels(far, self._options, folder, agents.heartbeat)))
        # The tunnels are tried, with a listener at the end that knows a token, before the store takes its port.
        (listener,) = first.ask(call(Agent.listen, (LOOPBACK,), seconds=STORE_S), STORE_S, agents.links)
        store = via = f"{LOOPBACK}:{listener.port}"
        if not first.here:
            via = str(folder / "store")
            tunnels.here(first.machine.name, via, store)
        ends = {first: listener.port}
        for link in others:
            agents.heartbeat()
            if link.here:
                with socket.create_server((LOOPBACK, 0)) as free:
                    ends[link] = free.getsockname()[1]
                tunnels.here(first.machine.name, f"{LOOPBACK}:{ends[link]}", store)
            else:
                ends[link] = tunnels.there(link.machine.name, via)
        asked: dict[str, Request[tuple[Attempt, ...]]] = {}
        for link, place in zip(agents.links, addresses, strict=True):
            # The machine's address for others must lead nowhere.
            targets = tuple(Listener(at, ends[link], listener.token) for at in (LOOPBACK, place.address))
            asked[link.machine.name] = call(Agent.connect, targets, STORE_CONNECT_S)
        del asked[first.machine.name]
        for name, answer in agents.ask_some(asked, STORE_S).items():
            if isinstance(answer, RunError):
                raise answer
            loopback, outside = answer
            if loopback.result != "ok":
                raise TunnelError(f"ssh port forwarding to {name} does not work (check PermitOpen in sshd_config)")
            if outside.result == "ok":
                exposed = f"the ssh server of {name} exposes forwarded ports (set GatewayPorts no in sshd_config)"
                raise TunnelError(exposed)
        first.ask(call(Agent.unlisten), STORE_S, agents.links)
        first.ask(call(Agent.bind, LOOPBACK, listener.port), STORE_S, agents.links)
        return tuple((LOOPBACK, ends[link]) for link in agents.links)
