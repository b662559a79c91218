"""Too few cores, too little memory, full or locked disks, and other jobs."""

from collections.abc import Iterator

from manyhands.cluster.doctor.findings import DoctorFinding, Survey, who

MIB = 1 << 20
BUSY_SHARE = 0.5
# Decoding processes hand over batches in /dev/shm; without room there they are killed.
SHM_LOW, SHM_NONE = 256 * MIB, 32 * MIB
# torch alone takes about half of it.
FREE_FOR_ONE = 1024 * MIB
DISK_LOW, DISK_NONE = 2048 * MIB, 200 * MIB
# Machines that get a command of their own.
_NAMED = 3


def run(survey: Survey) -> Iterator[DoctorFinding]:
    yield from _cpu(survey)
    yield from _memory(survey)
    yield from _disk(survey)
    for host, jobs in survey.fact("jobs").items():
        if jobs:
            shown = ", ".join(f"process {job['pid']} of {job['user']} ({job['command'][:60]})" for job in jobs[:2])
            more = f" and {len(jobs) - 2} more" if len(jobs) > 2 else ""
            what = f"another training job is running on {host}: {shown}{more}"
            hints = (
                "wait for the job, or stop your own: manyhands ps, manyhands stop",
                f"show the process: {survey.on_host(host, 'ps -fp ' + str(jobs[0]['pid']))}",
            )
            yield DoctorFinding("jobs", "warn", (host,), what, hints, f"jobs:{host}", (f"load:{host}",))


def _cpu(survey: Survey) -> Iterator[DoctorFinding]:
    """Processes and threads that the job asks for, then the load that is there."""
    cores = survey.fact("cores")
    over: dict[str, str] = {}
    for host, count in cores.items():
        variable = str(survey.facts[host].get("environment", {}).get("OMP_NUM_THREADS", ""))
        threads = survey.needs.threads or (int(variable) if variable.isdecimal() else 0)
        processes = survey.needs.processes.get(host, 1)
        if processes * max(threads, 1) > count:
            over[host] = f"{processes} × {threads or 1} on the {count:g} cores of {host}"
    if over:
        what = f"there are more threads than cores (processes × threads): {', '.join(over.values())}"
        hints = ("use fewer processes, or fewer threads: --cluster.threads 1",
                "unset OMP_NUM_THREADS on machines with a high value")  # fmt: skip
        yield DoctorFinding("cpu", "warn", tuple(over), what, hints, "threads")
    busy = {
        host: load
        for host, load in survey.fact("load").items()
        if host in cores and load > max(1.0, BUSY_SHARE * cores[host])
    }
    if busy:
        shown = ", ".join(f"load {load:.1f} on the {cores[host]:g} cores of {host}" for host, load in busy.items())
        what = f"cores are busy with other programs: {shown}; the slowest machine limits the speed"
        listing = survey.on_host(max(busy, key=lambda host: busy[host]), "top -b -n 1")
        hints = ("wait for other programs, or end them", f"list the programs: {listing}")
        yield DoctorFinding("cpu", "warn", tuple(busy), what, hints, "load")


def _memory(survey: Survey) -> Iterator[DoctorFinding]:
    small = {host: place for host, place in survey.fact("places", "shm").items() if place["free"] < SHM_LOW}
    if small:
        shown = ", ".join(
            f"{host} {place['free'] // MIB} MiB free of {place['size'] // MIB}" for host, place in small.items()
        )
        what = f"/dev/shm is small: {shown}; data workers pass batches through /dev/shm"
        hints = ("in a container: docker run --shm-size=8g (or --ipc=host)",
                "otherwise: sudo mount -o remount,size=50% /dev/shm",
                "or decode without data workers: --data.workers 0")  # fmt: skip
        severity = "fail" if any(place["free"] < SHM_NONE for place in small.values()) else "warn"
        yield DoctorFinding("memory", severity, tuple(small), what, hints, "shm")
    processes = {host: survey.needs.processes.get(host, 1) for host in survey.hosts}
    free = {host: memory["free"] for host, memory in survey.fact("memory").items()}
    short = [host for host in free if free[host] < FREE_FOR_ONE * processes[host]]
    if short:
        shown = ", ".join(f"{free[host] // MIB} MiB on {host} for {processes[host]} process(es)" for host in short)
        hints = (f"end other programs on {who(short)}, or use fewer processes",)
        yield DoctorFinding("memory", "warn", tuple(short), f"free memory is low: {shown}", hints, "memory")


def _disk(survey: Survey) -> Iterator[DoctorFinding]:
    """A run folder without write permission, or on a full disk."""
    places = survey.fact("places", "run folder")
    locked = [host for host, place in places.items() if not place["writable"]]
    if locked:
        first = locked[0]
        user = survey.facts[first].get("user", "this user")
        what = f"{user} has no write permission for {places[first]['path']} on {who(locked)}"
        looks = (survey.on_host(host, f"ls -ld {places[host]['path']}") for host in locked[:_NAMED])
        hints = (
            "choose another folder: --out or --cluster.workdir",
            *(f"check the permissions: {look}" for look in looks),
        )
        yield DoctorFinding("disk", "fail", tuple(locked), what, hints, "disk:locked")
    full = {host: place for host, place in places.items() if place["free"] < DISK_LOW and host not in locked}
    if full:
        shown = ", ".join(f"{host} {place['free'] // MIB} MiB at {place['path']}" for host, place in full.items())
        severity = "fail" if any(place["free"] < DISK_NONE for place in full.values()) else "warn"
        fullest = sorted(full, key=lambda host: full[host]["free"])[:_NAMED]
        looks = (survey.on_host(host, f"df -h {full[host]['path']}") for host in fullest)
        hints = (*(f"check the disk: {look}" for look in looks), "delete old runs: manyhands clean RUN --yes")
        yield DoctorFinding("disk", severity, tuple(full), f"free disk space is low: {shown}", hints, "disk:full")
