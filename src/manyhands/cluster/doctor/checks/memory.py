"""Too little memory, shared or not."""

from manyhands.cluster.doctor.compare import fact, who
from manyhands.cluster.doctor.findings import DoctorFinding, Survey

MIB = 1 << 20
# Decoding processes hand over batches in /dev/shm; without room there they are killed.
SHM_FEW, SHM_NONE = 256 * MIB, 32 * MIB
# torch alone takes about half of it.
FREE_FOR_ONE = 1024 * MIB


def run(survey: Survey) -> list[DoctorFinding]:
    return [*_shared(survey), *_whole(survey)]


def _shared(survey: Survey) -> list[DoctorFinding]:
    small = {host: place for host, place in fact(survey, "places", "shm").items() if place["free"] < SHM_FEW}
    if not small:
        return []
    shown = ", ".join(
        f"{host} {place['free'] // MIB} MiB free of {place['size'] // MIB}" for host, place in small.items()
    )
    what = f"/dev/shm is small: {shown}; data workers pass batches through /dev/shm"
    hints = ("in a container: docker run --shm-size=8g (or --ipc=host)",
            "otherwise: sudo mount -o remount,size=50% /dev/shm",
            "or decode without data workers: --data.workers 0")  # fmt: skip
    severity = "fail" if any(place["free"] < SHM_NONE for place in small.values()) else "warn"
    return [DoctorFinding("memory", severity, tuple(small), what, hints, "shm")]


def _whole(survey: Survey) -> list[DoctorFinding]:
    short = {
        host: memory["free"]
        for host, memory in fact(survey, "memory").items()
        if memory["free"] < FREE_FOR_ONE * survey.needs.processes.get(host, 1)
    }
    if not short:
        return []
    shown = ", ".join(
        f"{free // MIB} MiB on {host} for {survey.needs.processes.get(host, 1)} process(es)"
        for host, free in short.items()
    )
    what = f"free memory is low: {shown}"
    hints = (f"end other programs on {who(short)}, or use fewer processes",)
    return [DoctorFinding("memory", "warn", tuple(short), what, hints, "memory")]
