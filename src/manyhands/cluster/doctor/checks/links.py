"""Slow and asymmetric links: the slowest one sets the pace of all."""

import statistics
from collections.abc import Iterator

from manyhands.cluster.doctor.findings import DoctorFinding, Survey, who

# Below this, averaging the gradients of a small network takes longer than its step on an accelerator.
SLOW_MBPS = 400.0
# A link so much slower than the usual one holds up the others; above ENOUGH_MBPS it's the processors that differ.
ODD_FACTOR = 3.0
ENOUGH_MBPS = 2000.0
FAR_MS = 20.0
RESNET18_BYTES = 46_800_000
Pair = tuple[str, str]


def run(survey: Survey) -> Iterator[DoctorFinding]:
    if not survey.mbps:
        return
    found = [*_slow(survey), *_far(survey)]
    yield from found
    if not found:
        latency = max(survey.latency_ms.values(), default=0.0)
        what = f"links: at least {rate(min(survey.mbps.values()))}, at most {latency:.1f} ms"
        yield DoctorFinding("links", "ok", survey.hosts, what, cause="links")


def _slow(survey: Survey) -> Iterator[DoctorFinding]:
    """Blames a machine where all its pairs are slow in one way, otherwise single pairs; all alike is one finding."""
    usual = statistics.median(survey.mbps.values())
    limit = max(SLOW_MBPS, min(usual / ODD_FACTOR, ENOUGH_MBPS))
    slow = {pair for pair, mbps in survey.mbps.items() if mbps < limit}
    if len(slow) == len(survey.mbps):
        slowest, fastest = min(survey.mbps.values()), max(survey.mbps.values())
        speed = rate(slowest) if rate(slowest) == rate(fastest) else f"{rate(slowest)} to {rate(fastest)}"
        what = f"the network is slow: {speed} between the machines"
        yield DoctorFinding("links", "warn", survey.hosts, what, _consequence(survey, slowest), "links")
        return
    for host in sorted(survey.hosts, key=lambda host: -sum(host in pair for pair in slow)):
        ways = {
            way: {pair for pair in survey.mbps if pair[side] == host} for side, way in enumerate(("sends", "receives"))
        }
        bad = {way: pairs for way, pairs in ways.items() if pairs and pairs <= slow}
        if bad and len(survey.hosts) > 2:
            yield _slow_machine(survey, host, ways, [*bad])
            slow -= set.union(*bad.values())
    for one, two in sorted(slow, key=lambda pair: survey.mbps[pair]):
        there, back = survey.mbps[one, two], survey.mbps.get((two, one))
        uneven = back is not None and back > ODD_FACTOR * there
        word = "asymmetric" if uneven else "slow"
        what = f"the link from {one} to {two} is {word}: {rate(there)}{f' (reverse: {rate(back)})' if back else ''}"
        # Both ways of one slow link are one finding.
        cause = f"link:{one}:{two}" if uneven else f"link:{':'.join(sorted((one, two)))}"
        yield DoctorFinding("links", "warn", (one, two), what, _consequence(survey, there), cause)


def _slow_machine(survey: Survey, host: str, ways: dict[str, set[Pair]], bad: list[str]) -> DoctorFinding:
    mbps = {way: statistics.median(survey.mbps[pair] for pair in pairs) for way, pairs in ways.items() if pairs}
    asymmetric = len(mbps) == 2 and len(bad) == 1
    order = sorted(mbps, key=lambda way: way not in bad)
    shown = (", but " if asymmetric else ", ").join(f"{way} {rate(mbps[way])}" for way in order)
    what = f"the link of {host} is {'asymmetric' if asymmetric else 'slow'}: {shown}"
    name, nominal = survey.chosen.get(host, ("", ""))[0], ""
    for interface in survey.facts.get(host, {}).get("interfaces", ()):
        if interface["name"] == name and interface["speed_mbps"]:
            nominal = f"; the nominal speed of {name} is {interface['speed_mbps']} Mbit/s"
    check = f"check the cable, switch port, duplex setting and wireless of {host}{nominal}"
    hints = (*_consequence(survey, min(mbps.values())), check)
    return DoctorFinding("links", "warn", (host,), what, hints, f"link:{host}")


def _far(survey: Survey) -> Iterator[DoctorFinding]:
    far = {pair: ms for pair, ms in survey.latency_ms.items() if ms > FAR_MS}
    if far:
        pair = max(far, key=lambda pair: far[pair])
        hosts = tuple(host for host in survey.hosts if any(host in pair for pair in far))
        what = f"the latency between {who(hosts)} is high: {far[pair]:.0f} ms from {pair[0]} to {pair[1]} and back"
        hints = ("synchronise less often: --sync auto (each update waits for several messages)",)
        yield DoctorFinding("links", "warn", hosts, what, hints, "latency")


def _consequence(survey: Survey, mbps: float) -> tuple[str, ...]:
    machines = len(survey.hosts)
    seconds = 2 * (machines - 1) / machines * RESNET18_BYTES * 8 / mbps / 1e6
    update = f"each update of resnet18 ({RESNET18_BYTES / 1e6:.0f} MB) takes at least {seconds:.1f} s of network time"
    return (update, "use --sync auto to send less data; manyhands plan --link shows the effect")


def rate(mbps: float) -> str:
    """Formats a rate with its unit."""
    return f"{mbps / 1000:.1f} Gbit/s" if mbps >= 1000 else f"{mbps:.3g} Mbit/s"
