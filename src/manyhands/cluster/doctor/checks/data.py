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
        what = f"data is identical ({first['files']:,} files)"
        return [DoctorFinding("data", "ok", tuple(whole), what, cause="data")]
    return []


def _missing(survey: Survey, missing: list[str], found: dict[str, Any], there: dict[str, Any]) -> DoctorFinding:
    first = found[missing[0]]
    what = f"the data {first['path']} is missing on {who(missing)}"
    if first["kind"] == "named" and survey.needs.download:
        hints = ("let the job download the data at its start, or copy the data first",)
        return DoctorFinding("data", "warn", tuple(missing), what, hints, "data")
    giver = next(iter(there), "")
    copy = f"rsync -a {there[giver]['path']}/ {missing[0]}:{first['path']}/" if giver else ""
    hint = f"copy the data, on {giver}: {copy}" if giver else "check the path of the data"
    hints = (hint, "or choose a folder that exists on every machine")
    return DoctorFinding("data", "fail", tuple(missing), what, hints, "data", ("collective:data",))


def _differs(whole: dict[str, Any], odd: dict[str, str]) -> DoctorFinding:
    usual = next(host for host in whole if host not in odd)
    shown = ", ".join(_amount(host, whole[host]) for host in odd)
    what = f"data differs: {shown}, but {_amount(usual, whole[usual])}"
    if all(whole[host]["files"] == whole[usual]["files"] for host in odd):
        what += ", with different names or sizes"
    odd_host = next(iter(odd))
    copy = f"rsync -a --delete --dry-run {whole[usual]['path']}/ {odd_host}:{whole[odd_host]['path']}/"
    hints = (f"list the differences, on {usual}: {copy}", "copy the data: the same command without --dry-run")
    return DoctorFinding("data", "fail", tuple(odd), what, hints, "data")


def _amount(host: str, data: dict[str, Any]) -> str:
    return f"{host} has {data['files']:,} files of {data['bytes']:,} bytes"
