"""Other people's training, or an earlier one that was left behind."""

from manyhands.cluster.doctor.compare import fact, on_host
from manyhands.cluster.doctor.findings import DoctorFinding, Survey


def run(survey: Survey) -> list[DoctorFinding]:
    """One finding for each machine; a machine that is busy only through them is explained."""
    found: list[DoctorFinding] = []
    for host, jobs in fact(survey, "jobs").items():
        if jobs:
            shown = ", ".join(f"process {job['pid']} of {job['user']} ({job['command'][:60]})" for job in jobs[:2])
            more = f" and {len(jobs) - 2} more" if len(jobs) > 2 else ""
            what = f"another training job is running on {host}: {shown}{more}"
            hints = ("wait for the job, or stop your own: manyhands ps, manyhands stop",
                    f"show the process: {on_host(survey, host, 'ps -fp ' + str(jobs[0]['pid']))}")  # fmt: skip
            found.append(DoctorFinding("jobs", "warn", (host,), what, hints, f"jobs:{host}", (f"load:{host}",)))
    return found
