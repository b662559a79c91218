"""Surveys a job's machines: compares clocks, tests and measures connections, and selects each machine's address."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from itertools import islice
from typing import Any, NamedTuple

from manyhands.cluster.doctor.findings import Attempt, Facts, Pair, Survey
from manyhands.cluster.doctor.probe import Listener, Probe
from manyhands.cluster.messages import R, Request, call
from manyhands.core.errors import RunError

ANSWER_S = 30.0  # longer than the slowest measurement
MEASURE_S, LISTEN_S = 0.4, 120.0
# Limits for many machines: rounds that are measured, so that a survey takes seconds, and rounds in which machines
# connect, because 1000 machines have a million pairs.
MOST_ROUNDS, MOST_TRIED = 24, 64
# Prefixes of interfaces inside a machine, and of tunnels.
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "lxd", "vmnet", "vboxnet", "podman")
TUNNELS = ("tun", "tap", "wg", "tailscale", "zt", "utun")
# Sends requests to machines by name, in parallel; returns the answer or the RunError of each.
AskMachines = Callable[[Mapping[str, Request[Any]], float], Mapping[str, Any]]


def take_survey(ask: AskMachines, survey: Survey, *, measure: bool = True) -> None:
    """Tests the connections between a survey's machines. With `measure`, also measures clocks and link speeds."""
    surveyor = _Surveyor(ask, survey)
    if measure:
        surveyor.compare_clocks()
    if len(surveyor.hosts) > 1 and not survey.needs.through_ssh:
        surveyor.connect_all()
        if measure:
            surveyor.measure_all()
        surveyor.ask(dict.fromkeys(surveyor.hosts, call(Probe.unlisten)))
    surveyor.test_port()


class _Surveyor:
    """Sends requests to the machines that still answer, and fills in the survey."""

    def __init__(self, ask: AskMachines, survey: Survey) -> None:
        self.survey, self.hosts, self._ask = survey, list(survey.facts), ask
        self._listeners: dict[str, tuple[Listener, ...]] = {}

    def ask(self, requests: Mapping[str, Request[R]]) -> dict[str, R]:
        """Sends requests in parallel; returns the answers by host. A machine that fails gets no more requests."""
        asked = {host: request for host, request in requests.items() if host in self.hosts}
        answers: dict[str, R] = {}
        for host, reply in self._ask(asked, ANSWER_S).items() if asked else ():
            if isinstance(reply, RunError):
                self.hosts.remove(host)
                self.survey.facts.pop(host, None)
                hints = reply.hints or ("run the doctor again",)
                self.survey.errors[host] = RunError(f"{host} stopped answering: {reply.message}", host, hints)
            else:
                answers[host] = reply
        return answers

    def compare_clocks(self) -> None:
        """Measures the offset of each machine's clock. Half the duration of the request is the error bound."""
        for host in list(self.hosts):
            tries: list[tuple[float, float]] = []
            for _ in range(3):
                before = time.time()
                shown = self.ask({host: call(Probe.clock)}).get(host)
                after = time.time()
                if shown is not None:
                    tries.append(((after - before) / 2, shown - (before + after) / 2))
            if tries:
                uncertain, offset = min(tries)
                self.survey.clock_s[host] = (offset, uncertain)

    def connect_all(self) -> None:
        """Makes each machine listen, on the job's interface if it has that, and connect to the other machines."""
        wanted, survey = self.survey.needs.interface, self.survey
        narrowed = dict(survey.facts)
        for host, facts in survey.facts.items():
            if named := [entry for entry in facts.get("interfaces", ()) if entry["name"] == wanted]:
                narrowed[host] = {**facts, "interfaces": named}
        addresses = {host: tuple(local_candidates(facts)) for host, facts in narrowed.items()}
        answers = self.ask({host: call(Probe.listen, own, seconds=LISTEN_S) for host, own in addresses.items()})
        self._listeners = {host: tuple(one for one in found if not one.error) for host, found in answers.items()}
        requests = {
            host: call(Probe.connect, {other: self._listeners[other] for other in tried if other in self._listeners})
            for host, tried in connections_to_try(self.hosts).items()
        }
        for host, attempts in self.ask(requests).items():
            survey.reach |= {(host, other): tries for other, tries in attempts.items()}
        survey.chosen = choose_addresses({host: narrowed[host] for host in survey.facts}, survey.reach)

    def measure_all(self) -> None:
        """Measures bandwidth in rounds of disjoint pairs. Repeats slow pairs, because a machine may have been busy."""
        mbps, usual = self.survey.mbps, 0.0
        for again in (False, True):
            for pairs in islice(pair_rounds(self.hosts), MOST_ROUNDS):
                self._measure([p for p in pairs if not again or mbps.get(p, 0.0) <= usual / 2])
            usual = statistics.median(mbps.values()) if mbps else 0.0

    def _measure(self, pairs: list[Pair]) -> None:
        """Measures the bandwidth of each connected pair, preferably over the chosen address of the second machine."""
        survey, requests = self.survey, dict[str, Request[float | None]]()
        for pair in pairs:
            if reached := [attempt for attempt in survey.reach.get(pair, ()) if attempt.result == "ok"]:
                chosen = survey.chosen.get(pair[1], ("", ""))[1]
                attempt = min(reached, key=lambda attempt: attempt.address != chosen)
                target = next(one for one in self._listeners[pair[1]] if one.address == attempt.address)
                requests[pair[0]] = call(Probe.measure, target, MEASURE_S)
                if attempt.latency_ms is not None:
                    survey.latency_ms[pair] = attempt.latency_ms
        answers = self.ask(requests)
        for pair in pairs:
            if mbps := answers.get(pair[0]):
                survey.mbps[pair] = max(mbps, survey.mbps.get(pair, 0.0))

    def test_port(self) -> None:
        """Tests that the first machine can listen on the job's port, and that the other machines reach this port."""
        survey = self.survey
        host, port = survey.hosts[0], survey.needs.port
        address = survey.chosen.get(host, ("", ""))[1]
        if not (port and address and host in self.hosts):
            return
        (listener,) = self.ask({host: call(Probe.listen, (address,), port)}).get(host, (None,))
        problem = listener.error if listener else ""
        if listener and not problem:
            connect = call(Probe.connect, {host: (listener,)})
            answers = self.ask({other: connect for other in self.hosts if other != host})
            results = {other: tries[host][0].result for other, tries in answers.items()}
            problem = "; ".join(f"{other} can't connect ({why})" for other, why in results.items() if why != "ok")
        if problem:
            survey.port_errors[host] = problem
        self.ask({host: call(Probe.unlisten)})


def connections_to_try(hosts: Sequence[str]) -> dict[str, list[str]]:
    """Returns {host: hosts to connect to}: all other hosts; if there are many, a subset that includes the first."""
    rounds = islice(pair_rounds(hosts), MOST_TRIED)
    pairs = {pair for pairs in rounds for pair in pairs} | {(host, hosts[0]) for host in hosts[1:]}
    found: dict[str, list[str]] = {host: [] for host in hosts}
    for host, other in sorted(pairs):
        found[host].append(other)
    return found


class _Candidate(NamedTuple):
    interface: str  # its name
    ip: IPv4Address | IPv6Address
    network: str  # the subnet, as text
    speed_mbps: int  # as the interface reports it; 0 if unknown


def choose_addresses(facts: Mapping[str, Facts], reach: Mapping[Pair, Sequence[Attempt]]) -> dict[str, tuple[str, str]]:
    """Returns {host: (interface, address)}. All machines that tried to connect to the address have reached it.

    Prefers, in this order: an address family of all machines (IPv4 first), no container bridge or tunnel, the most
    shared subnet, private addresses, the faster interface. The result omits machines without such an address.
    """
    candidates: dict[str, list[_Candidate]] = {}
    for host in facts:
        tries = [reach[other, host] for other in facts if (other, host) in reach]
        reached = [{attempt.address for attempt in tried if attempt.result == "ok"} for tried in tries]
        if found := [each for each in _candidates(facts[host]) if all(str(each.ip) in own for own in reached)]:
            candidates[host] = found
    families = [{each.ip.version for each in found} for found in candidates.values()]
    everywhere = [version for version in (4, 6) if all(version in family for family in families)]
    shared = Counter(network for found in candidates.values() for network in {each.network for each in found})

    def order(each: _Candidate) -> tuple[object, ...]:
        family = each.ip.version != everywhere[0] if everywhere else each.ip.version
        preferred = (family, link_penalty(each.interface), -shared[each.network], not each.ip.is_private)
        return (*preferred, -each.speed_mbps, each.network, str(each.ip))

    best = {host: min(found, key=order) for host, found in candidates.items()}
    return {host: (candidate.interface, str(candidate.ip)) for host, candidate in best.items()}


def local_candidates(facts: Facts) -> list[str]:
    """Returns the addresses of a machine's interfaces that are up, without loopback and link-local addresses."""
    return [str(candidate.ip) for candidate in _candidates(facts)]


def link_penalty(interface: str) -> int:
    """Returns 0 for an interface that usually connects machines, 1 for a tunnel, 2 for a container bridge."""
    return 2 if interface.startswith(VIRTUAL) else int(interface.startswith(TUNNELS))


def _candidates(facts: Facts) -> Iterator[_Candidate]:
    for interface in facts.get("interfaces", ()):
        for entry in interface.get("addresses", ()) if interface.get("up") else ():
            ip = ip_address(entry["address"])
            # A link-local address is only valid together with an interface of the other machine.
            if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified):
                network = str(ip_network(f"{ip}/{entry['prefix']}", strict=False))
                yield _Candidate(interface["name"], ip, network, interface.get("speed_mbps") or 0)


def pair_rounds(hosts: Sequence[str]) -> Iterator[list[Pair]]:
    """Yields rounds of disjoint pairs (sender, receiver). Together they contain each ordered pair once."""
    seats: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    for _ in range(len(seats) - 1):
        facing = [(seats[place], seats[-1 - place]) for place in range(len(seats) // 2)]
        if pairs := [(one, two) for one, two in facing if one is not None and two is not None]:
            yield pairs
            yield [(two, one) for one, two in pairs]
        seats = [seats[0], seats[-1], *seats[1:-1]]  # the first stays, the others rotate
