"""Interfaces that programs would take by themselves and that don't lead to the other machines."""

from collections import defaultdict

from manyhands.cluster.doctor.compare import fact, who
from manyhands.cluster.doctor.findings import DoctorFinding, Survey
from manyhands.cluster.hosts.inventory import INTERFACE_VARIABLES


def run(survey: Survey) -> list[DoctorFinding]:
    """The job's own interface, then variables, then the default route."""
    return [*_asked_for(survey), *_variables(survey), *_default_route(survey)]


def _asked_for(survey: Survey) -> list[DoctorFinding]:
    wanted, lost = survey.needs.interface, []
    for host, interfaces in fact(survey, "interfaces").items():
        if wanted and not survey.needs.through_ssh and not any(i["name"] == wanted and i["up"] for i in interfaces):
            lost.append(host)
    if not lost:
        return []
    up = ", ".join(i["name"] for i in survey.facts[lost[0]]["interfaces"] if i["up"] and i["name"] != "lo")
    what = f"the interface {wanted} is missing or down on {who(lost)}; {lost[0]} has {up or 'no interface'}"
    hints = ("remove cluster.interface; manyhands then tests all interfaces", "or set an interface of every machine")
    return [DoctorFinding("interface", "fail", tuple(lost), what, hints, "interface", ("chosen", "collective"))]


def _variables(survey: Survey) -> list[DoctorFinding]:
    found: list[DoctorFinding] = []
    for host, environment in fact(survey, "environment").items():
        chosen = survey.chosen.get(host, ("", ""))[0]
        for name in INTERFACE_VARIABLES:
            given = environment.get(name, "")
            # NCCL's own rules: ^ leaves out, = is exact, several with commas, otherwise a beginning.
            words = given.lstrip("=").split(",")
            if chosen and given and not given.startswith("^") and not any(chosen.startswith(word) for word in words):
                what = f"{name}={given} is set on {host}, but other machines are reachable only on {chosen}"
                hints = (f"remove {name} from ~/.bashrc and /etc/environment on {host}",)
                found.append(DoctorFinding("interface", "warn", (host,), what, hints, f"variable:{host}:{name}"))
    return found


def _default_route(survey: Survey) -> list[DoctorFinding]:
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for host, default in fact(survey, "default_interface").items():
        chosen = survey.chosen.get(host, ("", ""))[0]
        if len(survey.hosts) > 1 and default and chosen and default != chosen:
            alike[default, chosen].append(host)
    return [
        DoctorFinding(
            "interface", "warn", tuple(hosts),
            f"the default route of {who(hosts)} uses {default}, but other machines are reachable on {chosen}; "
            f"manyhands uses {chosen}",
            (f"for other tools, export GLOO_SOCKET_IFNAME={chosen} NCCL_SOCKET_IFNAME={chosen}",),
            f"default-route:{default}:{chosen}",
        )
        for (default, chosen), hosts in alike.items()
    ]  # fmt: skip
