"""Data that is missing somewhere, or isn't the same everywhere."""

from typing import Any

from manyhands.cluster.doctor.compare import fact, odd_ones, who
from manyhands.cluster.doctor.findings import DoctorFinding, Survey


def run(survey: Survey) -> list[DoctorFinding]:
    """Missing first: what isn't there can't differ."""
    found = {host: data for host, data in fact(survey, "data").items() if data["kind"] != "none"}
    there = {host: data for host, data in found.items() if data["exists"]}
    missing = [host for host in found if host not in there]
    if missing:
        return [_missing(survey, missing, found, there)]
    whole = {host: data for host, data in there.items() if data["whole"]}
    _, odd = odd_ones({host: data["hash"] for host, data in whole.items()})
    if odd:
        return [_differs(whole, odd)]
    if len(whole) > 1:
        first = next(iter(whole.values()))
        return [DoctorFinding("data", "ok", tuple(whole), f"data is the same ({first['files']:,} files)", cause="data")]
    return []


def _missing(survey: Survey, missing: list[str], found: dict[str, Any], there: dict[str, Any]) -> DoctorFinding:
    first = found[missing[0]]
    what = f"{who(missing)} has no data at {first['path']}"
    if first["kind"] == "named" and survey.needs.download:
        mend = ("it will be fetched there when the job starts", "or copy it there first")
        return DoctorFinding("data", "warn", tuple(missing), what, mend, "data")
    giver = next(iter(there), "")
    copy = f"on {giver}: rsync -a {there[giver]['path']}/ {missing[0]}:{first['path']}/" if giver else ""
    mend = (copy or "is the path right?", "or name a folder that every machine has")
    return DoctorFinding("data", "fail", tuple(missing), what, mend, "data", ("collective:data",))


def _differs(whole: dict[str, Any], odd: dict[str, str]) -> DoctorFinding:
    usual = next(host for host in whole if host not in odd)
    shown = ", ".join(_amount(host, whole[host]) for host in odd)
    what = f"data differs: {shown}, but {_amount(usual, whole[usual])}"
    if all(whole[host]["files"] == whole[usual]["files"] for host in odd):
        what += ", and names or sizes are others"
    odd_host = next(iter(odd))
    mend = (f"on {usual}: rsync -a --delete --dry-run {whole[usual]['path']}/ {odd_host}:{whole[odd_host]['path']}/ "
            "shows what; without --dry-run it makes them equal",)  # fmt: skip
    return DoctorFinding("data", "fail", tuple(odd), what, mend, "data")


def _amount(host: str, data: dict[str, Any]) -> str:
    return f"{host} has {data['files']:,} files of {data['bytes']:,} bytes"
