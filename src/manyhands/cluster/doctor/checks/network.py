"""Checks for machines that can't reach each other, wrong network interfaces, a port in use, and slow links."""

import statistics
from collections.abc import Iterator

from manyhands.cluster.doctor.findings import DoctorFinding, Pair, Survey, join_hosts
from manyhands.cluster.doctor.survey import link_penalty
from manyhands.cluster.hosts.inventory import INTERFACE_VARIABLES

SLOW_MBPS = 400.0  # below this, averaging a small network's gradients takes longer than a step on an accelerator
ODD_FACTOR, ENOUGH_MBPS = 3.0, 2000.0  # slow: below median / ODD_FACTOR; above ENOUGH_MBPS CPUs are the limit
FAR_MS = 20.0
RESNET18_BYTES = 46_800_000
MEANINGS = {  # results of attempts, the most informative first
    "refused": "refuses the connection: a firewall rejects it",
    "timeout": "does not respond: a firewall drops the packets, or the route is missing",
    "other": "is answered by another machine or program: the address may be in use twice",
    "unreachable": "is unreachable: the route is missing, or a firewall rejects the connection",
}


def run(survey: Survey) -> Iterator[DoctorFinding]:
    """Yields findings on failed connections (one per machine at fault), interfaces, the job's port and link speed."""
    failing = {pair for pair, tries in survey.reach.items() if not any(a.result == "ok" for a in tries)}
    if not failing:
        yield from _check_common_address(survey)
    while failing:
        host, way, pairs = _find_faulty_machine(survey, failing)
        yield _unreachable_finding(survey, host, way, sorted(pairs))
        failing -= pairs
        if way == "both":
            failing -= {pair for pair in failing if host in pair}
    yield from _check_interfaces(survey)
    port = survey.needs.port
    for host, error in survey.port_errors.items():
        hints = (f"choose another port, such as {port + 1}, or remove the port to use a free one",
                 "or end the process that uses the port")  # fmt: skip
        what = f"port {port} of {host} can't be used: {error}"
        yield DoctorFinding("port", "fail", (host,), what, hints, f"port:{host}", ("collective",))
    links = [*_check_bandwidth(survey), *_check_latency(survey)] if survey.mbps else []
    yield from links
    if survey.mbps and not links:
        latency = max(survey.latency_ms.values(), default=0.0)
        what = f"links: at least {rate(min(survey.mbps.values()))}, latency at most {latency:.1f} ms"
        yield DoctorFinding("links", "ok", survey.hosts, what, cause="links")


def _find_faulty_machine(survey: Survey, failing: set[Pair]) -> tuple[str, str, set[Pair]]:
    """Returns (the machine in the most failing pairs, the direction "to", "from" or "both", its failing pairs)."""
    candidates: list[tuple[int, int, str, str, set[Pair]]] = []
    for host in survey.hosts:
        to, back = ({pair for pair in failing if pair[side] == host} for side in (1, 0))
        rules = bool(survey.facts.get(host, {}).get("firewall"))
        if to and back and to | back == {pair for pair in survey.reach if host in pair}:
            candidates.append((len(to) + len(back), rules, host, "both", to | back))
        for way, pairs in (("to", to), ("from", back)):
            # Usually the target is at fault, unless the source has firewall rules.
            candidates.append((len(pairs), 2 * rules + (way == "to"), host, way, pairs))
    _, _, host, way, pairs = max(candidates, key=lambda candidate: candidate[:2])
    return host, way, pairs


def _unreachable_finding(survey: Survey, host: str, way: str, pairs: list[Pair]) -> DoctorFinding:
    others = [other for other in survey.hosts if other != host and any(other in pair for pair in pairs)]
    pairs.sort(key=lambda pair: pair[1] != host)  # attempts to reach the machine, which are more informative, first
    attempts = [attempt for pair in pairs for attempt in survey.reach[pair]]
    attempt = min(attempts, key=lambda attempt: [*MEANINGS].index(attempt.result), default=None)
    place = f"{attempt.address} port {attempt.port}" if attempt else "no address"
    meaning = MEANINGS[attempt.result] if attempt else "can be tested: the machine has only loopback addresses"
    lost = {"to": f"{join_hosts(others)} can't reach {host}", "from": f"{host} can't reach {join_hosts(others)}",
            "both": f"{host} and {join_hosts(others)} can't reach each other"}  # fmt: skip
    what = f"{lost[way]}: {place} {meaning}"
    rules = [rule for name in (host, *others) for rule in survey.facts.get(name, {}).get("firewall", ())]
    hints = [f"check the firewall rule: {rule}" for rule in rules[:2]]
    if attempt and attempt.local:
        hints.append(f"check the route from {attempt.local}, the source address of the attempt")
    closed = host if way != "from" else join_hosts(others)
    ssh = "or use ssh tunnels: `manyhands launch` opens tunnels if the machines can log in to each other (or --relay)"
    hints += [f"open all ports in the firewall of {closed} for the other machines' addresses", ssh]
    cause, explains = f"reach:{host}:{way}", ("collective", "chosen")
    return DoctorFinding("reach", "fail", (host, *others), what, tuple(hints), cause, explains)


def _check_common_address(survey: Survey) -> Iterator[DoctorFinding]:
    known = [host for host in survey.hosts if host in survey.facts]
    if len(known) < 2 or not survey.reach:
        return
    lost = [host for host in known if host not in survey.chosen]
    bridges = [host for host in known if link_penalty(survey.chosen.get(host, ("", ""))[0]) == 2]
    if lost:
        what = f"{join_hosts(lost)} has no address that all other machines can reach"
        hints = ("connect all machines to one network", "or remove machines in other networks from the run")
        yield DoctorFinding("reach", "fail", tuple(lost), what, hints, "chosen", ("collective",))
    elif bridges:
        what = f"{join_hosts(bridges)} can only be reached over a container bridge ({survey.chosen[bridges[0]][0]})"
        hints = ("check that the network interface of each machine is up",)
        yield DoctorFinding("reach", "warn", tuple(bridges), what, hints, "bridge")
    else:
        places = ", ".join(f"{host} {survey.chosen[host][0]} {survey.chosen[host][1]}" for host in known)
        yield DoctorFinding("reach", "ok", tuple(known), f"all machines reach each other: {places}", cause="reach")


def _check_interfaces(survey: Survey) -> Iterator[DoctorFinding]:
    wanted = "" if survey.needs.through_ssh else survey.needs.interface
    interfaces = survey.fact("interfaces") if wanted else {}
    lost = [host for host, found in interfaces.items() if not any(i["name"] == wanted and i["up"] for i in found)]
    if lost:
        up = ", ".join(i["name"] for i in interfaces[lost[0]] if i["up"] and i["name"] != "lo")
        what = f"the interface {wanted} is missing or down on {join_hosts(lost)}; {lost[0]} has {up or 'no interface'}"
        hints = ("remove cluster.interface; manyhands then tests all interfaces",
                 "or set an interface of every machine")  # fmt: skip
        yield DoctorFinding("interface", "fail", tuple(lost), what, hints, "interface", ("chosen", "collective"))
    alike: dict[tuple[str, str], list[str]] = {}
    for host, (chosen, _) in survey.chosen.items():
        facts = survey.facts.get(host, {})
        for name in INTERFACE_VARIABLES:
            given = facts.get("environment", {}).get(name, "")
            # NCCL's syntax: ^ excludes, = matches exactly; otherwise prefixes, separated by commas.
            fits = given.startswith("^") or any(map(chosen.startswith, given.lstrip("=").split(",")))
            if given and not fits:
                what = f"{name}={given} is set on {host}, but other machines are reachable only on {chosen}"
                hints = (f"remove {name} from ~/.bashrc and /etc/environment on {host}",)
                yield DoctorFinding("interface", "warn", (host,), what, hints, f"variable:{host}:{name}")
        default = facts.get("default_interface")
        if len(survey.hosts) > 1 and default and default != chosen:
            alike.setdefault((default, chosen), []).append(host)
    for (default, chosen), hosts in alike.items():
        route = f"the default route of {join_hosts(hosts)} uses {default}, but other machines are reachable on {chosen}"
        hints = (f"for other tools, export GLOO_SOCKET_IFNAME={chosen} NCCL_SOCKET_IFNAME={chosen}",)
        cause = f"default-route:{default}:{chosen}"
        yield DoctorFinding("interface", "warn", tuple(hosts), f"{route}; manyhands uses {chosen}", hints, cause)


def _check_bandwidth(survey: Survey) -> Iterator[DoctorFinding]:
    """Yields one finding if all links are slow; otherwise one for each machine with slow links, or slow link."""
    limit = max(SLOW_MBPS, min(statistics.median(survey.mbps.values()) / ODD_FACTOR, ENOUGH_MBPS))
    slow = {pair for pair, mbps in survey.mbps.items() if mbps < limit}
    if len(slow) == len(survey.mbps):
        slowest, fastest = min(survey.mbps.values()), max(survey.mbps.values())
        speed = rate(slowest) if rate(slowest) == rate(fastest) else f"{rate(slowest)} to {rate(fastest)}"
        what = f"the network is slow: {speed} between the machines"
        yield DoctorFinding("links", "warn", survey.hosts, what, _slow_link_hints(survey, slowest), "links")
        return
    for host in sorted(survey.hosts, key=lambda host: -sum(host in pair for pair in slow)):
        sides = {"sends": 0, "receives": 1}
        ways = {way: {pair for pair in survey.mbps if pair[side] == host} for way, side in sides.items()}
        bad = {way: pairs for way, pairs in ways.items() if pairs and pairs <= slow}
        if bad and len(survey.hosts) > 2:
            yield _slow_machine_finding(survey, host, ways, [*bad])
            slow -= set.union(*bad.values())
    for one, two in sorted(slow, key=lambda pair: survey.mbps[pair]):
        there, back = survey.mbps[one, two], survey.mbps.get((two, one))
        uneven = back is not None and back > ODD_FACTOR * there
        word = "asymmetric" if uneven else "slow"
        what = f"the link from {one} to {two} is {word}: {rate(there)}{f' (reverse: {rate(back)})' if back else ''}"
        # Both directions of one slow link are one finding.
        cause = f"link:{one}:{two}" if uneven else f"link:{':'.join(sorted((one, two)))}"
        yield DoctorFinding("links", "warn", (one, two), what, _slow_link_hints(survey, there), cause)


def _slow_machine_finding(survey: Survey, host: str, ways: dict[str, set[Pair]], bad: list[str]) -> DoctorFinding:
    mbps = {way: statistics.median(survey.mbps[pair] for pair in pairs) for way, pairs in ways.items() if pairs}
    asymmetric = len(mbps) == 2 and len(bad) == 1
    order = sorted(mbps, key=lambda way: way not in bad)
    shown = (", but " if asymmetric else ", ").join(f"{way} {rate(mbps[way])}" for way in order)
    what = f"the link of {host} is {'asymmetric' if asymmetric else 'slow'}: {shown}"
    name = survey.chosen.get(host, ("", ""))[0]
    speeds = {each["name"]: each["speed_mbps"] for each in survey.facts.get(host, {}).get("interfaces", ())}
    nominal = f"; the nominal speed of {name} is {speeds[name]} Mbit/s" if speeds.get(name) else ""
    check = f"check the cable, switch port, duplex setting and wireless of {host}{nominal}"
    hints = (*_slow_link_hints(survey, min(mbps.values())), check)
    return DoctorFinding("links", "warn", (host,), what, hints, f"link:{host}")


def _check_latency(survey: Survey) -> Iterator[DoctorFinding]:
    far = {pair: ms for pair, ms in survey.latency_ms.items() if ms > FAR_MS}
    if far:
        pair = max(far, key=lambda pair: far[pair])
        hosts = tuple(host for host in survey.hosts if any(host in pair for pair in far))
        way = " to ".join(pair)
        what = f"the latency between {join_hosts(hosts)} is high: {far[pair]:.0f} ms from {way} and back"
        hints = ("synchronize less often: --sync auto (each update waits for several messages)",)
        yield DoctorFinding("links", "warn", hosts, what, hints, "latency")


def _slow_link_hints(survey: Survey, mbps: float) -> tuple[str, ...]:
    machines = len(survey.hosts)
    seconds = 2 * (machines - 1) / machines * RESNET18_BYTES * 8 / mbps / 1e6
    update = f"each update of resnet18 ({RESNET18_BYTES / 1e6:.0f} MB) takes at least {seconds:.1f} s of network time"
    return (f"use --sync auto to send less data: {update}", "estimate the effect: manyhands plan --link")


def rate(mbps: float) -> str:
    return f"{mbps / 1000:.1f} Gbit/s" if mbps >= 1000 else f"{mbps:.3g} Mbit/s"
