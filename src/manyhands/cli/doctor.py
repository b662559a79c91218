"""manyhands doctor."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from manyhands.cli.flags import Data, Hostfile, Interface, Model, Settings, settings
from manyhands.core.errors import EXIT_DOCTOR, EXIT_OK
from manyhands.core.terminal import plain, say, show, show_json

if TYPE_CHECKING:
    from manyhands.config.job import Job
    from manyhands.run.doctor import Diagnosis

MARKS = {"fail": ("✗", "bold red"), "warn": ("!", "yellow"), "ok": ("✓", "green")}


def doctor(  # noqa: PLR0913 - one argument for each flag
    data: Data = None,
    model: Model = None,
    /,
    *,
    hosts: Annotated[
        str | None, Parameter(help="machines, optionally with processes: n1,n2,n3 or n1:4,n2:4; default: this machine")
    ] = None,
    hostfile: Hostfile = None,
    processes: Annotated[int | None, Parameter(name=["-n", "--processes"], help="processes on each machine")] = None,
    interface: Interface = None,
    set_: Settings = None,
    exposure: Annotated[
        bool, Parameter(negative="", help="only list the open ports and who can reach them, now and while a job runs")
    ] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="print one JSON object")] = False,
) -> int:
    """Check whether a job can train, here or on many machines; takes seconds and changes nothing.

    Exits with code 3 if training would fail.
    """
    from manyhands.config.load import load_job
    from manyhands.run.doctor import diagnose
    from manyhands.run.resume import announce_reach

    job_file = Path(data) if data and data.endswith(".toml") else None
    flags = {
        "data.name": None if job_file else data,
        "model.name": model,
        "cluster.hosts": hosts.split(",") if hosts else None,
        "cluster.hostfile": hostfile,
        "cluster.processes": processes,
        "cluster.interface": interface,
        **settings(set_ or []),
    }
    loaded = load_job(flags, file=job_file)
    announce_reach(loaded)
    job = loaded.job
    if exposure:
        return _expose(job, as_json=as_json)
    diagnosis = diagnose(job, say)
    if as_json:
        show_json(diagnosis.as_json())
    else:
        _print(diagnosis)
    return diagnosis.exit_code


def _expose(job: "Job", *, as_json: bool) -> int:
    from manyhands.run.doctor import exposure

    found = exposure(job, say)
    if as_json:
        show_json(found.as_json())
    else:
        show(found.lines())
    return EXIT_DOCTOR if found.why_not else EXIT_OK


def _print(diagnosis: "Diagnosis") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for finding in diagnosis.findings:
        mark, style = MARKS[finding.severity]
        console.print(Text(f"{mark} {plain(finding.what)}", style=style))
        for number, line in enumerate(finding.hints):
            console.print(Text(f"    {'do:' if number == 0 else '   '} {plain(line)}"))
    for line in _table(diagnosis):
        console.print(Text(plain(line)))
    console.print(Text(_summary(diagnosis), style="bold"))


def _table(diagnosis: "Diagnosis") -> list[str]:
    """Each pair's speed and latency, in lines; none where nothing was measured."""
    survey = diagnosis.survey
    if not survey.mbps:
        return []
    width = max(16, *(len(host) + 2 for host in survey.hosts))
    lines = ["", "Mbit/s (ms)".ljust(width) + "".join(f"to {host}".rjust(width) for host in survey.hosts)]
    for one in survey.hosts:
        cells = [_cell(diagnosis, one, two).rjust(width) for two in survey.hosts]
        lines.append(f"from {one}".ljust(width) + "".join(cells))
    return [*lines, ""]


def _cell(diagnosis: "Diagnosis", one: str, two: str) -> str:
    mbps, latency = diagnosis.survey.mbps.get((one, two)), diagnosis.survey.latency_ms.get((one, two))
    if mbps is None:
        return "·" if one == two else "?"
    speed = f"{mbps:.3g}" if mbps < 1000 else f"{mbps:.0f}"
    return speed if latency is None else f"{speed} ({latency:.2f})"


def _summary(diagnosis: "Diagnosis") -> str:
    counts = {word: sum(f.severity == word for f in diagnosis.findings) for word in MARKS}
    where = f"on {len(diagnosis.survey.hosts)} machines" if len(diagnosis.survey.hosts) > 1 else "here"
    if counts["fail"]:
        return f"training {where} would fail: problems to fix first: {counts['fail']}"
    return f"training {where} should work" + (f"; warnings: {counts['warn']}" if counts["warn"] else "")
