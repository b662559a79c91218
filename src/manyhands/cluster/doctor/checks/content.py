"""The user's code and data, which must be on every machine and the same on all."""

from collections.abc import Iterator
from typing import Any

from manyhands.cluster.doctor.findings import DoctorFinding, Survey, odd_ones, who

SHOWN = 4
HINTS = ("copy the code with the job: --sync-code", "or update the folders: git pull, rsync")


def run(survey: Survey) -> Iterator[DoctorFinding]:
    yield from _data(survey)
    yield from _code(survey)


def _code(survey: Survey) -> Iterator[DoctorFinding]:
    """Compares the files of the work folder; only a job that uses them fails by their difference."""
    needed = survey.needs.code
    folders = {host: code for host, code in survey.fact("code").items() if "exists" in code}
    missing = [host for host, code in folders.items() if not code["exists"]]
    if missing and needed:
        what = f"the folder of the job's code, {folders[missing[0]]['path']}, is missing on {who(missing)}"
        hints = (HINTS[0], "or set the folder on these machines: --cluster.workdir")
        yield DoctorFinding("code", "fail", tuple(missing), what, hints, "code")
        return
    complete = {host: code for host, code in folders.items() if code["exists"] and code["whole"]}
    for name in survey.needs.files:
        inside = not name.startswith(("/", "~", ".."))
        hosts = [host for host, code in complete.items() if inside and name not in code["files"]]
        if hosts:
            what = f"{name} is missing in {folders[hosts[0]]['path']} on {who(hosts)}"
            yield DoctorFinding("code", "fail", tuple(hosts), what, HINTS, "code")
            return
    _, odd = odd_ones({host: code["hash"] for host, code in complete.items()})
    # Folders without a common file name are no copies of one another.
    if odd and (needed or set.intersection(*(set(code["files"]) for code in complete.values()))):
        what = _code_difference(complete, odd)
        yield DoctorFinding("code", "fail" if needed else "warn", tuple(odd), what, HINTS, "code")
    elif needed and len(complete) > 1:
        count = len(next(iter(complete.values()))["files"])
        yield DoctorFinding("code", "ok", tuple(complete), f"code is identical ({count} files)", cause="code")


def _code_difference(folders: dict[str, dict[str, Any]], odd: dict[str, str]) -> str:
    usual = next(host for host in folders if host not in odd)
    theirs, ours = folders[next(iter(odd))], folders[usual]
    names = sorted(dict(theirs["files"].items() ^ ours["files"].items()))
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    revisions = [str(code["revision"]) for code in (theirs, ours)]
    at = f" (revision {revisions[0]}, {usual} {revisions[1]})" if all(revisions) and len(set(revisions)) > 1 else ""
    return f"the code on {who(odd)} differs from {usual}{at}: {shown}"


def _data(survey: Survey) -> Iterator[DoctorFinding]:
    """Missing first: what isn't there can't differ."""
    found = {host: data for host, data in survey.fact("data").items() if data["kind"] != "none"}
    missing = [host for host, data in found.items() if not data["exists"]]
    if missing:
        yield _missing_data(survey, missing, found)
        return
    complete = {host: data for host, data in found.items() if data["whole"]}
    amounts = {host: f"{data['files']:,} files of {data['bytes']:,} bytes" for host, data in complete.items()}
    _, odd = odd_ones({host: data["hash"] for host, data in complete.items()})
    if odd:
        usual, first = next(host for host in complete if host not in odd), next(iter(odd))
        shown = ", ".join(f"{host} has {amounts[host]}" for host in odd)
        what = f"data differs: {shown}, but {usual} has {amounts[usual]}"
        if all(complete[host]["files"] == complete[usual]["files"] for host in odd):
            what += ", with different names or sizes"
        copy = f"rsync -a --delete --dry-run {complete[usual]['path']}/ {first}:{complete[first]['path']}/"
        hints = (f"list the differences, on {usual}: {copy}", "copy the data: the same command without --dry-run")
        yield DoctorFinding("data", "fail", tuple(odd), what, hints, "data")
    elif len(complete) > 1:
        what = f"data is identical ({next(iter(complete.values()))['files']:,} files)"
        yield DoctorFinding("data", "ok", tuple(complete), what, cause="data")


def _missing_data(survey: Survey, missing: list[str], found: dict[str, Any]) -> DoctorFinding:
    path = found[missing[0]]["path"]
    what = f"the data {path} is missing on {who(missing)}"
    if found[missing[0]]["kind"] == "named" and survey.needs.download:
        hints = ("let the job download the data at its start, or copy the data first",)
        return DoctorFinding("data", "warn", tuple(missing), what, hints, "data")
    source = next((host for host in found if host not in missing), "")
    copy = f"copy the data, on {source}: rsync -a {found[source]['path']}/ {missing[0]}:{path}/" if source else ""
    hints = (copy or "check the path of the data", "or choose a folder that exists on every machine")
    return DoctorFinding("data", "fail", tuple(missing), what, hints, "data", ("collective:data",))
