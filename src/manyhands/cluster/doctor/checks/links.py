"""Slow and asymmetric links: the slowest one sets the pace of all."""

import statistics
from collections.abc import Iterable

from manyhands.cluster.doctor.compare import who
from manyhands.cluster.doctor.findings import DoctorFinding, Survey

# Below this, agreeing on the gradients of a small network takes longer than its step on an accelerator.
SLOW_MBPS = 400.0
# A link so much slower than the usual one holds up the others; above ENOUGH_MBPS it's the processors that differ.
ODD_FACTOR = 3.0
ENOUGH_MBPS = 2000.0
FAR_MS = 20.0
RESNET18_BYTES = 46_800_000
Pair = tuple[str, str]


def run(survey: Survey) -> list[DoctorFinding]:
    """Blames a machine where all its pairs are slow in one way, otherwise single pairs; all alike is one finding."""
    if not survey.mbps:
        return []
    usual = statistics.median(survey.mbps.values())
    limit = max(SLOW_MBPS, min(usual / ODD_FACTOR, ENOUGH_MBPS))
    slow = {pair for pair, mbps in survey.mbps.items() if mbps < limit}
    if len(slow) == len(survey.mbps):
        return [_all(survey), *_far(survey)]
    found: list[DoctorFinding] = []
    for host in sorted(survey.hosts, key=lambda host: -sum(host in pair for pair in slow)):
        ways = {"sends": _pairs_of(survey, host, 0), "receives": _pairs_of(survey, host, 1)}
        bad = [way for way, pairs in ways.items() if pairs and pairs <= slow]
        if bad and len(survey.hosts) > 2:
            found.append(_machine(survey, host, bad, *ways.values()))
            slow -= {pair for way in bad for pair in ways[way]}
    found += [_pair(survey, pair) for pair in sorted(slow, key=lambda pair: survey.mbps[pair])]
    return [*found, *_far(survey)] or [_fine(survey)]


def _pairs_of(survey: Survey, host: str, side: int) -> set[Pair]:
    return {pair for pair in survey.mbps if pair[side] == host}


def _machine(survey: Survey, host: str, ways: list[str], sent: set[Pair], received: set[Pair]) -> DoctorFinding:
    out, back = (_median(survey, pairs) for pairs in (sent, received))
    if len(ways) == 2:
        what = f"the link of {host} is slow: sends {rate(out)}, receives {rate(back)}"
    else:
        first, second = (out, back) if ways == ["sends"] else (back, out)
        other = "receives" if ways == ["sends"] else "sends"
        what = f"the link of {host} is asymmetric: {ways[0]} {rate(first)}, but {other} {rate(second)}"
    worst = min(out, back)
    speed = _speed(survey, host)
    hints = (
        *_consequence(survey, worst),
        f"check the cable, switch port, duplex setting and wireless of {host}{speed}",
    )
    return DoctorFinding("links", "warn", (host,), what, hints, f"link:{host}")


def _pair(survey: Survey, pair: Pair) -> DoctorFinding:
    there = survey.mbps[pair]
    back = survey.mbps.get((pair[1], pair[0]))
    uneven = back is not None and back > ODD_FACTOR * there
    word = "asymmetric" if uneven else "slow"
    what = f"the link from {pair[0]} to {pair[1]} is {word}: {rate(there)}{f', back {rate(back)}' if back else ''}"
    # Both ways of one slow link are one finding.
    cause = f"link:{pair[0]}:{pair[1]}" if uneven else f"link:{':'.join(sorted(pair))}"
    return DoctorFinding("links", "warn", pair, what, _consequence(survey, there), cause)


def _all(survey: Survey) -> DoctorFinding:
    slowest, fastest = min(survey.mbps.values()), max(survey.mbps.values())
    speed = rate(slowest) if rate(slowest) == rate(fastest) else f"{rate(slowest)} to {rate(fastest)}"
    what = f"the network is slow: {speed} between the machines"
    return DoctorFinding("links", "warn", survey.hosts, what, _consequence(survey, slowest), "links")


def _fine(survey: Survey) -> DoctorFinding:
    latency = max(survey.latency_ms.values(), default=0.0)
    what = f"links: at least {rate(min(survey.mbps.values()))}, at most {latency:.1f} ms"
    return DoctorFinding("links", "ok", survey.hosts, what, cause="links")


def _far(survey: Survey) -> list[DoctorFinding]:
    far = {pair: ms for pair, ms in survey.latency_ms.items() if ms > FAR_MS}
    if not far:
        return []
    pair = max(far, key=lambda pair: far[pair])
    hosts = tuple(host for host in survey.hosts if any(host in pair for pair in far))
    what = f"the latency between {who(hosts)} is high: {far[pair]:.0f} ms from {pair[0]} to {pair[1]} and back"
    hint = "synchronise less often: --sync auto (each update waits for several messages)"
    return [DoctorFinding("links", "warn", hosts, what, (hint,), "latency")]


def _consequence(survey: Survey, mbps: float) -> tuple[str, ...]:
    machines = len(survey.hosts)
    seconds = 2 * (machines - 1) / machines * RESNET18_BYTES * 8 / mbps / 1e6
    size = f"{RESNET18_BYTES / 1e6:.0f} MB"
    said = f"each update of resnet18 ({size}) takes at least {seconds:.1f} s of network time"
    return (said, "use --sync auto to send less data; manyhands plan --link shows the effect")


def _median(survey: Survey, pairs: Iterable[Pair]) -> float:
    return statistics.median(survey.mbps[pair] for pair in pairs)


def _speed(survey: Survey, host: str) -> str:
    name = survey.chosen.get(host, ("", ""))[0]
    for interface in survey.facts.get(host, {}).get("interfaces", ()):
        if interface["name"] == name and interface["speed_mbps"]:
            return f"; the nominal speed of {name} is {interface['speed_mbps']} Mbit/s"
    return ""


def rate(mbps: float) -> str:
    """As people say it."""
    return f"{mbps / 1000:.1f} Gbit/s" if mbps >= 1000 else f"{mbps:.3g} Mbit/s"
