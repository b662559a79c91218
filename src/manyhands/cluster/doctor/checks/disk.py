"""Folders that a run can't be written to, and full disks."""

from typing import Any

from manyhands.cluster.doctor.compare import fact, on_host, who
from manyhands.cluster.doctor.findings import DoctorFinding, Survey

MIB = 1 << 20
FEW, NONE = 2048 * MIB, 200 * MIB
# Machines that get a command of their own.
_NAMED = 3


def run(survey: Survey) -> list[DoctorFinding]:
    places = fact(survey, "places", "run folder")
    locked = {host: place for host, place in places.items() if not place["writable"]}
    full = {host: place for host, place in places.items() if place["free"] < FEW and host not in locked}
    return [*([_locked(survey, locked)] if locked else []), *([_full(survey, full)] if full else [])]


def _locked(survey: Survey, places: dict[str, Any]) -> DoctorFinding:
    host, place = next(iter(places.items()))
    user = survey.facts[host].get("user", "this user")
    what = f"{user} has no write permission for {place['path']} on {who(places)}"
    looks = (on_host(survey, host, f"ls -ld {places[host]['path']}") for host in list(places)[:_NAMED])
    hints = ("choose another folder: --out or --cluster.workdir", *(f"check the permissions: {look}" for look in looks))
    return DoctorFinding("disk", "fail", tuple(places), what, hints, "disk:locked")


def _full(survey: Survey, places: dict[str, Any]) -> DoctorFinding:
    shown = ", ".join(f"{host} {place['free'] // MIB} MiB at {place['path']}" for host, place in places.items())
    severity = "fail" if any(place["free"] < NONE for place in places.values()) else "warn"
    fullest = sorted(places, key=lambda host: places[host]["free"])[:_NAMED]
    looks = (on_host(survey, host, f"df -h {places[host]['path']}") for host in fullest)
    hints = (*(f"check the disk: {look}" for look in looks), "delete old runs: manyhands clean RUN --yes")
    return DoctorFinding("disk", severity, tuple(places), f"free disk space is low: {shown}", hints, "disk:full")
