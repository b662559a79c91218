"""Opens ssh tunnels between the machines of a run: to the store, and between machines that only ssh connects.

The store listens on loopback of the first machine, and ssh forwards ports to it. If ssh servers refuse forwarding, the
store listens on the first machine's network address, as the collectives do.

Two machines are connected directly if one can log in to the other, otherwise through a relay: a machine of the run that
reaches both or, if there is none and --relay is set, the launcher's machine. The machines of the run open the tunnels,
so that the tunnels outlive the launcher. No key is copied, and no ssh agent is forwarded.
"""

import contextlib
import random
import shlex
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.machines import Machines, RunMachine
from manyhands.cluster.agents.ssh import ssh_command
from manyhands.cluster.agents.switchboard import READY
from manyhands.cluster.agents.tunnel import MachineTunnels, SshTunnels, TunnelError
from manyhands.cluster.doctor.findings import Attempt, Pair
from manyhands.cluster.doctor.probe import Listener
from manyhands.cluster.hosts.inventory import LOOPBACK
from manyhands.cluster.messages import Request, call
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import RunError, UserError
from manyhands.core.scratch import scratch
from manyhands.core.timeouts import OPEN_TUNNELS_S, STORE_CONNECT_S, STORE_S, TUNNEL_ENDS_S
from manyhands.parallel.group.tunnel_ends import TunnelEnds

HEAD, MOST_MACHINES = "this machine", 200


class NoTunnelError(UserError):
    """Raised if two machines can't log in to each other, and no relay is available."""

    alone = ""  # the machine that is in most of the unconnected pairs


class TunnelRoutes:
    """Ssh tunnels between the machines of one start. The names in a pair are in rank order."""

    def __init__(self, machines: Machines, options: ClusterOptions) -> None:
        self._machines, self._options = machines, options
        self._named = {machine.name: machine for machine in machines.running}
        self._opened_by, self._through = dict[Pair, str](), dict[Pair, str]()  # the opener or the relay of each pair
        self.errors = dict[Pair, str]()  # why a machine could not log in to another one
        # A random network, so that several runs on the same machines use different addresses.
        net = f"127.{random.SystemRandom().randrange(64, 250)}.{random.SystemRandom().randrange(256)}"
        addresses = {machine: f"{net}.{number}" for number, machine in enumerate(machines.running, 1)}
        requests = {machine: call(Agent.open_tunnel_ends, address) for machine, address in addresses.items()}
        folders = machines.ask(requests, TUNNEL_ENDS_S)
        self.ends = {each.name: TunnelEnds(addresses[each], folders[each]) for each in folders}

    def summary(self) -> str:
        by_relay: dict[str, list[str]] = defaultdict(list)
        for pair, relay in self._through.items():
            by_relay[relay].append("–".join(pair))
        direct = ["–".join(pair) for pair in self._opened_by]
        parts = [f"{_join_pairs(direct)} directly"] if direct else []
        parts += [f"{_join_pairs(pairs)} through {relay}" for relay, pairs in by_relay.items()]
        return f"ssh tunnels between machines: {'; '.join(parts)}; all other ports listen on loopback only"

    def unconnected(self) -> list[Pair]:
        connected = {*self._opened_by, *self._through}
        return [pair for pair in combinations(self._named, 2) if pair not in connected]

    def connect_directly(self, *, back: bool = False) -> None:
        """Connects pairs directly: the first machine, or with `back` the second, logs in to the other."""
        logins: dict[Pair, list[str]] = {}
        for one, two in (pair[::-1] if back else pair for pair in self.unconnected()):
            here, there = self.ends[one], self.ends[two]
            ours = {here.socket_to(there.address): there.in_socket}
            theirs = {there.socket_to(here.address): here.in_socket}
            logins[one, two] = self._login_command(two, ours, theirs)
        for (one, two), error in self._run_logins(logins).items():
            if error:
                self.errors[one, two] = error
            else:
                self._opened_by[(two, one) if back else (one, two)] = one

    def connect_through_relays(self) -> None:
        """Relays the traffic of each unconnected pair through a machine that has a tunnel to both."""
        relays, logins = dict[Pair, str](), dict[Pair, list[str]]()
        for one, two in self.unconnected():
            if found := [each for each in self._named if self._opener(one, each) and self._opener(two, each)]:
                relays[one, two] = found[0]
        for (name, relay), sockets in self._assign_relays(relays, self.ends).items():
            if self._opener(name, relay) == name:
                logins[name, relay] = self._login_command(relay, sockets, {})
            else:
                logins[relay, name] = self._login_command(name, {}, sockets)
        for (one, two), error in self._run_logins(logins).items():
            if error:
                raise RunError(f"{one} can no longer log in to {two} by ssh: {error}", two)

    def connect_through_launcher(self, relay: MachineTunnels) -> None:
        """Relays the traffic of each unconnected pair through the launcher's machine."""
        relay.open("")
        relays, commands = dict.fromkeys(self.unconnected(), HEAD), dict[str, list[str]]()
        for (name, _), sockets in self._assign_relays(relays, {HEAD: relay.ends}).items():
            ends = self.ends[name]
            commands[name] = self._login_command(name, {relay.ends.socket_to(ends.address): ends.in_socket}, sockets)
        for name, error in relay.start(commands, OPEN_TUNNELS_S, self._machines.heartbeat).items():
            hints = (f"set AllowStreamLocalForwarding yes in sshd_config on {name}",)
            raise RunError(f"can't open an ssh tunnel to {name}: {error}", name, hints)

    def _assign_relays(self, relays: Mapping[Pair, str], ends: Mapping[str, TunnelEnds]) -> dict[Pair, dict[str, str]]:
        """Records the relay of each pair; returns {(machine, relay): {socket of the machine: socket of the relay}}."""
        self._through |= relays
        sockets: dict[Pair, dict[str, str]] = defaultdict(dict)
        for pair, relay in relays.items():
            for name, other in (pair, pair[::-1]):
                address = self.ends[other].address
                sockets[name, relay][self.ends[name].socket_to(address)] = ends[relay].socket_to(address)
        return sockets

    def _opener(self, one: str, two: str) -> str:
        """Returns the machine that opened the tunnel between two machines; an empty string without a tunnel."""
        return self._opened_by.get((one, two)) or self._opened_by.get((two, one), "")

    def _login_command(self, to: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
        """Returns the ssh command to a machine. `ours`: {local: remote socket} (ssh -L); `theirs`: {remote: local}."""
        settings = {"ExitOnForwardFailure": "yes", "ControlMaster": "no", "ControlPath": "none", "ForwardAgent": "no",
                    "ForwardX11": "no"}  # fmt: skip
        words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        words += [word for made, leads in ours.items() for word in ("-L", f"{made}:{leads}")]
        words += [word for made, leads in theirs.items() for word in ("-R", f"{made}:{leads}")]
        # Only the intended machine has that folder; the same name may mean another machine there.
        script = f"test -d {shlex.quote(self.ends[to].folder)} && echo {shlex.quote(READY)} && exec cat"
        return [*ssh_command(self._named[to].spec, self._options, *words), f"exec sh -c {shlex.quote(script)}"]

    def _run_logins(self, logins: Mapping[Pair, list[str]]) -> dict[Pair, str]:
        """Makes the first machine of each pair log in to the second. Returns an error message or "" for each pair."""
        commands: dict[str, dict[str, list[str]]] = defaultdict(dict)
        for (one, two), login in logins.items():
            commands[one][two] = login
        asked = {self._named[name]: call(Agent.open_tunnels, tried, OPEN_TUNNELS_S) for name, tried in commands.items()}
        answers = self._machines.ask(asked, OPEN_TUNNELS_S + TUNNEL_ENDS_S)
        return {(one, two): answers[self._named[one]].get(two, "") for one, two in logins}


def join_through_ssh(machines: Machines, options: ClusterOptions, relay: MachineTunnels) -> TunnelRoutes:
    """Opens ssh tunnels between all pairs of machines; the agents keep the tunnels until the next call.

    `relay` opens tunnels from the launcher's machine if they are needed and cluster.relay is set. Raises NoTunnelError
    if two machines can't be connected. Raises RunError if a machine is lost or can't open tunnels.
    """
    relay.close()
    if (count := len(machines.running)) > MOST_MACHINES:
        what = f"ssh tunnels support at most {MOST_MACHINES} machines, but the run has {count}"
        raise UserError(what, "cluster.interface", ("connect the machines to one network",))
    routes = TunnelRoutes(machines, options)
    routes.connect_directly()
    routes.connect_directly(back=True)
    routes.connect_through_relays()
    if left := routes.unconnected():
        if not options.relay:
            raise _no_tunnel_error(left, routes.errors)
        routes.connect_through_launcher(relay)
    return routes


def _no_tunnel_error(pairs: Sequence[Pair], errors: Mapping[Pair, str]) -> NoTunnelError:
    (one, two), *_ = pairs
    why = errors.get((one, two)) or errors.get((two, one), "")
    more = f" (and {len(pairs) - 1} more pairs)" if len(pairs) > 1 else ""
    error = NoTunnelError(
        f"{one} and {two}{more} can't log in to each other without a password{why and f' ({why})'}, and no machine of "
        "the run can log in to both machines",
        "cluster.relay",
        ("relay the traffic through this machine, at half its bandwidth: --relay",
         f"or set up ssh with a key from {one} to {two}", "or connect the two machines by a network"),
    )  # fmt: skip
    error.alone, _ = Counter(name for pair in reversed(pairs) for name in reversed(pair)).most_common(1)[0]
    return error


def _join_pairs(pairs: Sequence[str]) -> str:
    return ", ".join(pairs) if len(pairs) <= 6 else f"{', '.join(pairs[:5])} and {len(pairs) - 5} more"


class StoreTunnel(contextlib.ExitStack):
    """Ssh tunnels to the store (TCPStore), opened anew for each start of a run and closed at the end of the context."""

    def __init__(self, options: ClusterOptions) -> None:
        super().__init__()
        self._options = options

    def open(self, machines: Machines) -> str:
        """Makes the first machine listen for the store, and sets `store` of each machine.

        Returns the reason why the store listens on a network address, or "" for loopback. Raises RunError.
        """
        self.close()
        first, *others = machines.running
        if not others:
            first.store = LOOPBACK, first.agent.ask(call(Agent.bind, LOOPBACK), STORE_S)
            return ""
        try:
            self._open_through_ssh(machines)
        except TunnelError as error:
            self.close()
            open_store(machines)
            return str(error)
        return ""

    def _open_through_ssh(self, machines: Machines) -> None:
        first, *others = machines.running
        folder = self.enter_context(scratch("ssh", swept=True))
        far = [machine.spec for machine in machines.running if not machine.agent.here]
        tunnels = self.enter_context(contextlib.closing(SshTunnels(far, self._options, folder, machines.heartbeat)))
        # Test the tunnels with a listener that checks a token, before the store listens on the same port.
        (listener,) = first.agent.ask(call(Agent.listen, (LOOPBACK,), seconds=STORE_S), STORE_S, machines.links)
        store = via = f"{LOOPBACK}:{listener.port}"
        if not first.agent.here:
            via = str(folder / "store")
            tunnels.forward_local(first.name, via, store)
        first.store = LOOPBACK, listener.port
        asked: dict[RunMachine, Request[dict[str, tuple[Attempt, ...]]]] = {}
        for machine in others:
            machines.heartbeat()
            if machine.agent.here:
                with socket.create_server((LOOPBACK, 0)) as free:
                    port = free.getsockname()[1]
                tunnels.forward_local(first.name, f"{LOOPBACK}:{port}", store)
            else:
                port = tunnels.forward_remote(machine.name, via)
            machine.store = LOOPBACK, port
            # The forwarded port must not be open on the machine's network address.
            ways = {"loopback": LOOPBACK, "outside": machine.address.address}
            targets = {way: (Listener(address, port, listener.token),) for way, address in ways.items()}
            asked[machine] = call(Agent.connect, targets, STORE_CONNECT_S)
        for machine, answer in machines.ask(asked, STORE_S).items():
            if answer["loopback"][0].result != "ok":
                what = f"ssh port forwarding to {machine.name} does not work (check PermitOpen in sshd_config)"
                raise TunnelError(what)
            if answer["outside"][0].result == "ok":
                what = f"the ssh server of {machine.name} exposes forwarded ports (set GatewayPorts no in sshd_config)"
                raise TunnelError(what)
        first.agent.ask(call(Agent.unlisten), STORE_S, machines.links)
        first.agent.ask(call(Agent.bind, LOOPBACK, listener.port), STORE_S, machines.links)


def open_store(machines: Machines) -> None:
    """Makes the first machine listen for the store on its network address."""
    first = machines.running[0]
    port = first.agent.ask(call(Agent.bind, first.address.address), STORE_S, machines.links)
    for machine in machines.running:
        machine.store = first.address.address, port
