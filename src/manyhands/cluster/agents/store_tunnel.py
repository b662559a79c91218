"""How the machines of a run come to their store: it listens on loopback of the first, and ssh leads to it.

Where ssh forwards nothing, it listens on the first machine's address between the machines, as the collectives do.
"""

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.machines import Machines, RunMachine
from manyhands.cluster.agents.tunnel import SshTunnels, TunnelError
from manyhands.cluster.doctor.findings import Attempt
from manyhands.cluster.doctor.probe import Listener
from manyhands.cluster.hosts.inventory import LOOPBACK
from manyhands.cluster.messages import Request, call
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import RunError
from manyhands.core.scratch import scratch
from manyhands.core.timeouts import STORE_CONNECT_S, STORE_S


@dataclass(frozen=True)
class StorePlaces:
    """Where each machine's processes find the store of one start."""

    ends: Mapping[RunMachine, tuple[str, int]]  # address and port for each machine
    why_open: str = ""  # why it doesn't listen on loopback alone; empty where it does


class StoreTunnel(contextlib.ExitStack):
    """Tunnels to the store, which are made anew for each start of a run; closed with the block."""

    def __init__(self, options: ClusterOptions) -> None:
        super().__init__()
        self._options = options

    def open(self, machines: Machines) -> StorePlaces:
        """Has the first machine listen for the store, and the others reach it.

        Raises:
            RunError: a machine is lost.
        """
        self.close()
        first, *others = machines.running
        if not others:
            return StorePlaces({first: (LOOPBACK, first.agent.ask(call(Agent.bind, LOOPBACK), STORE_S))})
        try:
            return StorePlaces(self._through_ssh(machines))
        except TunnelError as error:
            self.close()
            return open_store(machines, str(error))

    def _through_ssh(self, machines: Machines) -> dict[RunMachine, tuple[str, int]]:
        first, *others = machines.running
        folder = self.enter_context(scratch("ssh", swept=True))
        far = [machine.spec for machine in machines.running if not machine.agent.here]
        tunnels = self.enter_context(contextlib.closing(SshTunnels(far, self._options, folder, machines.heartbeat)))
        # The tunnels are tried, with a listener at the end that knows a token, before the store takes its port.
        (listener,) = first.agent.ask(call(Agent.listen, (LOOPBACK,), seconds=STORE_S), STORE_S, machines.links)
        store = via = f"{LOOPBACK}:{listener.port}"
        if not first.agent.here:
            via = str(folder / "store")
            tunnels.here(first.name, via, store)
        ends = {first: (LOOPBACK, listener.port)}
        asked: dict[str, Request[dict[str, tuple[Attempt, ...]]]] = {}
        for machine in others:
            machines.heartbeat()
            if machine.agent.here:
                with socket.create_server((LOOPBACK, 0)) as free:
                    port = free.getsockname()[1]
                tunnels.here(first.name, f"{LOOPBACK}:{port}", store)
            else:
                port = tunnels.there(machine.name, via)
            ends[machine] = (LOOPBACK, port)
            # The machine's address for others must lead nowhere.
            ways = {"loopback": LOOPBACK, "outside": machine.address.address}
            targets = {way: (Listener(address, port, listener.token),) for way, address in ways.items()}
            asked[machine.name] = call(Agent.connect, targets, STORE_CONNECT_S)
        for name, answer in machines.ask_named(asked, STORE_S).items():
            if isinstance(answer, RunError):
                raise answer
            if answer["loopback"][0].result != "ok":
                raise TunnelError(f"ssh port forwarding to {name} does not work (check PermitOpen in sshd_config)")
            if answer["outside"][0].result == "ok":
                exposed = f"the ssh server of {name} exposes forwarded ports (set GatewayPorts no in sshd_config)"
                raise TunnelError(exposed)
        first.agent.ask(call(Agent.unlisten), STORE_S, machines.links)
        first.agent.ask(call(Agent.bind, LOOPBACK, listener.port), STORE_S, machines.links)
        return ends


def open_store(machines: Machines, why_open: str = "") -> StorePlaces:
    """Has the first machine listen for the store at its address for the others."""
    first = machines.running[0]
    address = first.address.address
    port = first.agent.ask(call(Agent.bind, address), STORE_S, machines.links)
    return StorePlaces(dict.fromkeys(machines.running, (address, port)), why_open)
