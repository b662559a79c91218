"""Machines that don't answer, are listed twice, have misleading names, other clocks or missing facts."""

import ipaddress
import math
import statistics
from collections.abc import Iterator

from manyhands.cluster.doctor.findings import DoctorFinding, Survey, who
from manyhands.cluster.doctor.survey import local_candidates

APART_S = 1.0


def run(survey: Survey) -> Iterator[DoctorFinding]:
    """One finding for each machine without an answer; whatever else fails for lack of it is explained."""
    for host, contact in survey.errors.items():
        cause = f"contact:{host}"
        yield DoctorFinding("contact", "fail", (host,), contact.what, contact.hints, cause, ("collective",))
    yield from _listed_twice(survey)
    yield from _names(survey)
    yield from _clocks(survey)
    # One finding for each kind of fact, since it is likely missing everywhere for one reason.
    missing: dict[str, dict[str, str]] = {}
    for host, errors in survey.fact("errors").items():
        for name, error in errors.items():
            if name != "accelerators":  # a driver that fails has a check of its own
                missing.setdefault(name, {})[host] = error
    for name, errors in missing.items():
        what = f"can't determine the {name.replace('_', ' ')} of {', '.join(errors)}: {next(iter(errors.values()))}"
        yield DoctorFinding("facts", "warn", tuple(errors), what, cause=f"facts:{name}")


def _listed_twice(survey: Survey) -> Iterator[DoctorFinding]:
    """A machine that is reached by two names would share its cores, devices and folders with itself."""
    names: dict[str, list[str]] = {}
    for host, machine in survey.fact("machine").items():
        names.setdefault(machine, []).append(host)
    for first, *others in names.values():
        if others:
            hosts = (first, *others)
            hints = (f'list the machine once, with {len(hosts)} processes: "{first} slots={len(hosts)}"',)
            what = f"{' and '.join(hosts)} are the same machine"
            yield DoctorFinding("twice", "fail", hosts, what, hints, f"twice:{first}", ("collective",))


def _names(survey: Survey) -> Iterator[DoctorFinding]:
    """A host name that resolves to loopback or to another machine; only where there are other machines."""
    loopback: dict[str, str] = {}
    hints: dict[str, tuple[str, ...]] = {}
    for host, name in survey.fact("name").items() if len(survey.hosts) > 1 else ():
        address = survey.chosen.get(host, ("", "ADDRESS"))[1]
        hints[host] = (f'for other tools, add to /etc/hosts on {host}: "{address} {name["host"]}"',)
        addresses, own = [text.partition("%")[0] for text in name["addresses"]], {*local_candidates(survey.facts[host])}
        if addresses and ipaddress.ip_address(addresses[0]).is_loopback:
            loopback[host] = addresses[0]
        elif addresses and survey.facts[host].get("interfaces") and not own & {*addresses}:
            what = f"the host name of {host} resolves to {addresses[0]}, which is not an address of {host}"
            yield DoctorFinding("names", "warn", (host,), what, hints[host], f"name:{host}")
    if loopback:
        host = next(iter(loopback))
        shown = f"the host name of {who(loopback)} resolves to {loopback[host]}"
        what = f"{shown}; manyhands uses addresses instead, other tools may fail"
        yield DoctorFinding("names", "warn", tuple(loopback), what, hints[host], "loopback-name")


def _clocks(survey: Survey) -> Iterator[DoctorFinding]:
    """Clocks far from the median, beyond what the duration of the question leaves uncertain."""
    if len(survey.clock_s) < 2:
        return
    middle = statistics.median_low([offset for offset, _ in survey.clock_s.values()])
    apart = {host: offset - middle for host, (offset, _) in survey.clock_s.items()}
    far = {host: by for host, by in apart.items() if abs(by) - survey.clock_s[host][1] > APART_S}
    if not far:
        what = f"clocks are within {math.ceil(max(map(abs, apart.values())) * 1000)} ms"
        yield DoctorFinding("clock", "ok", tuple(apart), what, cause="clock")
        return
    shown = ", ".join(f"{host} is {abs(by):.1f} s {'ahead' if by > 0 else 'behind'}" for host, by in far.items())
    others = who(host for host in apart if host not in far)
    what = f"clocks differ: {shown} of {others}; times in logs will not match, and certificates may be refused"
    hints = tuple(f"synchronise the clock: {survey.on_host(host, 'sudo timedatectl set-ntp true')}" for host in far)
    yield DoctorFinding("clock", "warn", tuple(far), what, hints, "clock")
