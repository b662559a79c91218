"""Hostnames that lead the other machines astray."""

import ipaddress

from manyhands.cluster.doctor.addresses import local_candidates
from manyhands.cluster.doctor.compare import fact, who
from manyhands.cluster.doctor.findings import DoctorFinding, Survey


def run(survey: Survey) -> list[DoctorFinding]:
    """A name that leads to loopback, to another machine, or nowhere; only where there are other machines."""
    loopback: dict[str, str] = {}
    strange: dict[str, str] = {}
    for host, name in fact(survey, "name").items() if len(survey.hosts) > 1 else ():
        addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in name["addresses"]]
        if addresses and addresses[0].is_loopback:
            loopback[host] = str(addresses[0])
        elif addresses and survey.facts[host].get("interfaces") and not _own(survey, host, name["addresses"]):
            strange[host] = name["addresses"][0]
    found = [_to_loopback(survey, loopback)] if loopback else []
    for host, address in strange.items():
        what = f"the host name of {host} resolves to {address}, which is not an address of {host}"
        found.append(DoctorFinding("names", "warn", (host,), what, (_line(survey, host),), f"name:{host}"))
    return found


def _to_loopback(survey: Survey, hosts: dict[str, str]) -> DoctorFinding:
    address = next(iter(hosts.values()))
    what = (
        f"the host name of {who(hosts)} resolves to {address}; manyhands uses addresses instead, other tools may fail"
    )
    return DoctorFinding("names", "warn", tuple(hosts), what, (_line(survey, next(iter(hosts))),), "loopback-name")


def _own(survey: Survey, host: str, addresses: list[str]) -> bool:
    return bool(set(local_candidates(survey.facts[host])) & {text.partition("%")[0] for text in addresses})


def _line(survey: Survey, host: str) -> str:
    address = survey.chosen.get(host, ("", "ADDRESS"))[1]
    return f'for other tools, add to /etc/hosts on {host}: "{address} {survey.facts[host]["name"]["host"]}"'
