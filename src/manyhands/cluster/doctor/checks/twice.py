"""Several names of one machine."""

from manyhands.cluster.doctor.compare import fact
from manyhands.cluster.doctor.findings import DoctorFinding, Survey


def run(survey: Survey) -> list[DoctorFinding]:
    """A machine that is reached by two names would share its cores, devices and folders with itself."""
    names: dict[str, list[str]] = {}
    for host, machine in fact(survey, "machine").items():
        names.setdefault(machine, []).append(host)
    return [
        DoctorFinding(
            "twice",
            "fail",
            tuple(hosts),
            f"{' and '.join(hosts)} are one machine",
            (f'name it once, for {len(hosts)} processes as "{hosts[0]} slots={len(hosts)}"',),
            f"twice:{hosts[0]}",
            ("collective",),
        )
        for hosts in names.values()
        if len(hosts) > 1
    ]
