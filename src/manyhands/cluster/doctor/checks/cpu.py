"""More threads than cores, and cores that are busy already."""

from manyhands.cluster.doctor.compare import fact, on_host
from manyhands.cluster.doctor.findings import DoctorFinding, Survey

BUSY_SHARE = 0.5


def run(survey: Survey) -> list[DoctorFinding]:
    """Processes and threads that the job asks for, then the load that is there."""
    return [*_too_many(survey), *_busy(survey)]


def _too_many(survey: Survey) -> list[DoctorFinding]:
    over: dict[str, str] = {}
    for host, cores in fact(survey, "cores").items():
        processes = survey.needs.processes.get(host, 1)
        threads = survey.needs.threads or _from_variable(survey, host)
        if processes > cores or processes * threads > cores:
            over[host] = f"{processes} × {threads or 1} on the {cores:g} cores of {host}"
    if not over:
        return []
    what = f"there are more threads than cores (processes × threads): {', '.join(over.values())}"
    hints = ("use fewer processes, or fewer threads: --cluster.threads 1",
            "unset OMP_NUM_THREADS on machines with a high value")  # fmt: skip
    return [DoctorFinding("cpu", "warn", tuple(over), what, hints, "threads")]


def _from_variable(survey: Survey, host: str) -> int:
    text = str(survey.facts[host].get("environment", {}).get("OMP_NUM_THREADS", ""))
    return int(text) if text.isdecimal() else 0


def _busy(survey: Survey) -> list[DoctorFinding]:
    cores = fact(survey, "cores")
    busy = {
        host: load
        for host, load in fact(survey, "load").items()
        if host in cores and load > max(1.0, BUSY_SHARE * cores[host])
    }
    if not busy:
        return []
    many = ", ".join(f"load {load:.1f} on the {cores[host]:g} cores of {host}" for host, load in busy.items())
    what = f"cores are busy with other programs: {many}; the slowest machine sets the pace"
    worst = max(busy, key=lambda host: busy[host])
    hints = ("wait for other programs, or end them", f"list the programs: {on_host(survey, worst, 'top -b -n 1')}")
    return [DoctorFinding("cpu", "warn", tuple(busy), what, hints, "load")]
