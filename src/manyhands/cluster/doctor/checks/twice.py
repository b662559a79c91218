"""Several names of one machine."""

from manyhands.cluster.doctor.compare import fact
from manyhands.cluster.doctor.findings import DoctorFinding, Survey


def run(survey: Survey) -> list[DoctorFinding]:
    """A machine that is reached by two names would share its cores, devices and folders with itself."""
    names: dict[str, list[str]] = {}
    for host, machine in fact(survey, "machine").items():
        names.setdefault(machine, []).append(host)
    found: list[DoctorFinding] = []
    for first, *others in names.values():
        if others:
            hosts = (first, *others)
            hints = (f'list the machine once, with {len(hosts)} processes: "{first} slots={len(hosts)}"',)
            what = f"{' and '.join(hosts)} are the same machine"
            found.append(DoctorFinding("twice", "fail", hosts, what, hints, f"twice:{first}", ("collective",)))
    return found
