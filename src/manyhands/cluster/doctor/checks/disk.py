"""Folders that a run can't be written to, and full disks."""

from typing import Any

from manyhands.cluster.doctor.compare import fact, on_host, who
from manyhands.cluster.doctor.findings import DoctorFinding, Survey

MIB = 1 << 20
FEW, NONE = 2048 * MIB, 200 * MIB


def run(survey: Survey) -> list[DoctorFinding]:
    places = fact(survey, "places", "run folder")
    locked = {host: place for host, place in places.items() if not place["writable"]}
    full = {host: place for host, place in places.items() if place["free"] < FEW and host not in locked}
    return [*([_locked(survey, locked)] if locked else []), *([_full(survey, full)] if full else [])]


def _locked(survey: Survey, places: dict[str, Any]) -> DoctorFinding:
    host, place = next(iter(places.items()))
    user = survey.facts[host].get("user", "this user")
    what = f"{user} may not write to {place['path']} on {who(places)}"
    mend = ("name another folder: --out or --cluster.workdir", on_host(survey, host, f"ls -ld {place['path']}"))
    return DoctorFinding("disk", "fail", tuple(places), what, mend, "disk:locked")


def _full(survey: Survey, places: dict[str, Any]) -> DoctorFinding:
    shown = ", ".join(f"{host} {place['free'] // MIB} MiB at {place['path']}" for host, place in places.items())
    severity = "fail" if any(place["free"] < NONE for place in places.values()) else "warn"
    first = next(iter(places))
    mend = (on_host(survey, first, f"df -h {places[first]['path']}"), "old runs and their checkpoints take most of it")
    return DoctorFinding("disk", severity, tuple(places), f"little disk is free: {shown}", mend, "disk:full")
