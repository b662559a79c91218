"""The user's own code, which must be the same on every machine."""

from typing import Any

from manyhands.cluster.doctor.compare import fact, odd_ones, who
from manyhands.cluster.doctor.findings import DoctorFinding, Survey

SHOWN = 4
HINTS = ("copy the code with the job: --sync-code", "or update the folders: git pull, rsync")


def run(survey: Survey) -> list[DoctorFinding]:
    """Compares the files of the work folder; only a job that uses them fails by their difference."""
    folders = {host: code for host, code in fact(survey, "code").items() if "exists" in code}
    there = {host: code for host, code in folders.items() if code["exists"]}
    missing = [host for host in folders if host not in there]
    if missing and survey.needs.code:
        what = f"the folder of the job's code, {folders[missing[0]]['path']}, is missing on {who(missing)}"
        hints = (HINTS[0], "or set the folder on these machines: --cluster.workdir")
        return [DoctorFinding("code", "fail", tuple(missing), what, hints, "code")]
    lacking = _lacking(survey, there)
    if lacking:
        return [lacking]
    whole = {host: code for host, code in there.items() if code["whole"]}
    _, odd = odd_ones({host: code["hash"] for host, code in whole.items()})
    if odd and (survey.needs.code or _alike(whole)):
        severity = "fail" if survey.needs.code else "warn"
        return [DoctorFinding("code", severity, tuple(odd), _difference(whole, odd), HINTS, "code")]
    if survey.needs.code and len(whole) > 1:
        count = len(next(iter(whole.values()))["files"])
        return [DoctorFinding("code", "ok", tuple(whole), f"code is identical ({count} files)", cause="code")]
    return []


def _lacking(survey: Survey, folders: dict[str, dict[str, Any]]) -> DoctorFinding | None:
    """A file that the job names, and that isn't in the work folder of some machine."""
    for name in survey.needs.files:
        inside = not name.startswith(("/", "~", ".."))
        hosts = [host for host, code in folders.items() if inside and code["whole"] and name not in code["files"]]
        if hosts:
            what = f"{name} is missing in {folders[hosts[0]]['path']} on {who(hosts)}"
            return DoctorFinding("code", "fail", tuple(hosts), what, HINTS, "code")
    return None


def _alike(folders: dict[str, dict[str, dict[str, str]]]) -> bool:
    """Whether the folders are copies of one another at all: they share a file's name."""
    names = [set(code["files"]) for code in folders.values()]
    return bool(set.intersection(*names))


def _difference(folders: dict[str, dict[str, dict[str, str]]], odd: dict[str, str]) -> str:
    usual = next(host for host in folders if host not in odd)
    theirs, ours = folders[next(iter(odd))], folders[usual]
    names = sorted(name for name in {*theirs["files"], *ours["files"]}
                   if theirs["files"].get(name) != ours["files"].get(name))  # fmt: skip
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    revisions = [str(code["revision"]) for code in (theirs, ours)]
    at = f" (revision {revisions[0]}, {usual} {revisions[1]})" if all(revisions) and len(set(revisions)) > 1 else ""
    return f"the code on {who(odd)} differs from {usual}{at}: {shown}"
