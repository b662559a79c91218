"""Machines that don't reach each other: closed ports, and by what."""

from collections.abc import Sequence

from manyhands.cluster.doctor.addresses import unlikely
from manyhands.cluster.doctor.compare import who
from manyhands.cluster.doctor.findings import Attempt, DoctorFinding, Survey

Pair = tuple[str, str]
MEANINGS = {
    "refused": "refuses the connection: a firewall rejects it",
    "timeout": "does not respond: a firewall drops the packets, or the route is missing",
    "unreachable": "is unreachable: the route is missing, or a firewall rejects the connection",
    "other": "is answered by another machine or program: the address may be in use twice",
}


def run(survey: Survey) -> list[DoctorFinding]:
    """One finding for a machine that nobody reaches or that reaches nobody; one for each pair beside these."""
    failing = {pair for pair, tries in survey.reach.items() if not any(a.result == "ok" for a in tries)}
    if not failing:
        return _no_common_address(survey)
    found: list[DoctorFinding] = []
    while failing:
        host, way, pairs = _worst(survey, failing)
        found.append(_finding(survey, host, way, sorted(pairs)))
        failing -= pairs
        if way == "both":
            failing -= {pair for pair in failing if host in pair}
    return found


def _worst(survey: Survey, failing: set[Pair]) -> tuple[str, str, set[Pair]]:
    """The machine that explains most of the failing pairs: as the one reached for, as the one reaching, or both."""
    candidates: list[tuple[int, int, str, str, set[Pair]]] = []
    for host in survey.hosts:
        to, back = ({pair for pair in failing if pair[side] == host} for side in (1, 0))
        all_to, all_back = (sum(pair[side] == host for pair in survey.reach) for side in (1, 0))
        rules = bool(survey.facts.get(host, {}).get("firewall"))
        if to and back and len(to) == all_to and len(back) == all_back:
            candidates.append((len(to) + len(back), rules, host, "both", to | back))
        for way, pairs in (("to", to), ("from", back)):
            # That a machine isn't reached is more often its own fault than the other's, but for rules that are known.
            candidates.append((len(pairs), 2 * rules + (way == "to"), host, way, pairs))
    _, _, host, way, pairs = max(candidates, key=lambda candidate: candidate[:2])
    return host, way, pairs


def _finding(survey: Survey, host: str, way: str, pairs: list[Pair]) -> DoctorFinding:
    others = [pair[0] if pair[1] == host else pair[1] for pair in pairs]
    others = [other for other in survey.hosts if other in others]
    # What was met on the way to the machine says more than how its own attempts ended.
    pairs.sort(key=lambda pair: pair[1] != host)
    attempt = _most_specific([attempt for pair in pairs for attempt in survey.reach[pair]])
    place = f"{attempt.address} port {attempt.port}" if attempt else "any address"
    meaning = MEANINGS[attempt.result] if attempt else "can't be tested: the machine has only loopback addresses"
    said = {
        "to": f"{who(others)} can't reach {host}: {place} {meaning}",
        "from": f"{host} can't reach {who(others)}: {place} {meaning}",
        "both": f"{host} and {who(others)} can't reach each other: {place} {meaning}",
    }[way]
    rules = [rule for name in (host, *others) for rule in survey.facts.get(name, {}).get("firewall", ())]
    hints = [f"check the firewall rule: {rule}" for rule in rules[:2]]
    if attempt and attempt.local:
        hints.append(f"check the route from {attempt.local}, the source address of the attempt")
    closed = host if way != "from" else who(others)
    hints += [f"open all ports in the firewall of {closed} for the other machines' addresses"]
    hints += [
        "or use ssh tunnels: `manyhands launch` opens tunnels if the machines can log in to each other, or --relay"
    ]
    explains = ("collective", "chosen")
    return DoctorFinding("reach", "fail", (host, *others), said, tuple(hints), f"reach:{host}:{way}", explains)


def _most_specific(tries: Sequence[Attempt]) -> Attempt | None:
    """The attempt that says most: refused tells more than silence, silence more than a network that isn't there."""
    order = ("refused", "timeout", "other", "unreachable")
    return min(tries, key=lambda attempt: order.index(attempt.result), default=None)


def _no_common_address(survey: Survey) -> list[DoctorFinding]:
    known = [host for host in survey.hosts if host in survey.facts]
    lost = [host for host in known if host not in survey.chosen]
    if len(known) < 2 or not survey.reach:
        return []
    if lost:
        what = f"{who(lost)} has no address that all other machines can reach"
        hints = ("connect all machines to one network", "or remove machines in other networks from the run")
        return [DoctorFinding("reach", "fail", tuple(lost), what, hints, "chosen", ("collective",))]
    bridges = [host for host in known if unlikely(survey.chosen[host][0]) == 2]
    if bridges:
        what = f"{who(bridges)} can only be reached over a container bridge ({survey.chosen[bridges[0]][0]})"
        hint = "check that the network interface of each machine is up"
        return [DoctorFinding("reach", "warn", tuple(bridges), what, (hint,), "bridge")]
    places = ", ".join(f"{host} {survey.chosen[host][0]} {survey.chosen[host][1]}" for host in known)
    return [DoctorFinding("reach", "ok", tuple(known), f"all machines reach each other: {places}", cause="reach")]
