"""The commands that look at machines and options: doctor, explain and schema."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from manyhands.cli.flags import (
    Backend,
    Data,
    Device,
    Flags,
    Hostfile,
    Int,
    Interface,
    Json,
    Key,
    Model,
    PlaceFlags,
    Settings,
    job_file,
    load,
    named_job,
    split_hosts,
)
from manyhands.cli.printing import align
from manyhands.core.errors import EXIT_DOCTOR, EXIT_OK
from manyhands.core.shown import plain, say, show, show_json

if TYPE_CHECKING:
    from manyhands.run.doctor import Diagnosis

MARKS = {"fail": ("✗", "bold red"), "warn": ("!", "yellow"), "ok": ("✓", "green")}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DoctorFlags(Flags):
    """The machines that are checked."""

    hosts: Annotated[
        str | None, Parameter(help="machines, optionally with processes: n1,n2,n3 or n1:4,n2:4; default: this machine")
    ] = None
    hostfile: Hostfile = None
    processes: Annotated[
        Int | None, Parameter(name=["-n", "--processes"], help="processes on each machine"), Key("cluster.processes")
    ] = None
    interface: Interface = None
    set_: Settings = None


def doctor(
    data: Data = None,
    model: Model = None,
    /,
    *,
    flags: DoctorFlags = DoctorFlags(),
    exposure: Annotated[
        bool, Parameter(negative="", help="only list the open ports and who can reach them, now and while a job runs")
    ] = False,
    as_json: Json = False,
) -> int:
    """Check whether a job can train, here or on many machines; takes seconds and changes nothing.

    Exits with code 3 if training would fail.
    """
    from manyhands.run.own_code import announce_reach

    values = named_job(data, model) | {"cluster.hosts": split_hosts(flags.hosts)}
    loaded = load(values, flags, file=job_file(data))
    announce_reach(loaded)
    if exposure:
        from manyhands.run.exposure import exposure as find_exposure

        found = find_exposure(loaded.job, say)
        if as_json:
            show_json(found.as_json())
        else:
            show(found.lines())
        return EXIT_DOCTOR if found.why_not else EXIT_OK
    from manyhands.run.doctor import diagnose

    diagnosis = diagnose(loaded.job, say)
    if as_json:
        show_json(diagnosis.as_json())
    else:
        _print(diagnosis)
    return diagnosis.exit_code


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
    """Speed and latency between each pair of machines, in lines; none where nothing was measured."""
    survey = diagnosis.survey
    if not survey.mbps:
        return []
    head = ["Mbit/s (ms)", *(f"to {host}" for host in survey.hosts)]
    rows = [[f"from {one}", *(_cell(diagnosis, one, two) for two in survey.hosts)] for one in survey.hosts]
    return ["", *align([head, *rows], left=1), ""]


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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExplainFlags(PlaceFlags):
    """The place of this process, and what it would compute on."""

    device: Device = None
    backend: Backend = None
    set_: Settings = None


def explain(
    job: Annotated[Path | None, Parameter(help="a job.toml")] = None,
    /,
    *,
    processes: Annotated[Int | None, Parameter(name=["-n", "--processes"], help="processes on this machine")] = None,
    flags: ExplainFlags = ExplainFlags(),
    write: Annotated[
        Path | None,
        Parameter(help="write the machines to a new file and exit: *.json is a rank table, others a hostfile"),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show the rank, world size, master address and device of this process, and where each value comes from.

    Run explain in place of train, for example: srun manyhands explain.
    """
    from manyhands.run.explain import explained, write_cluster

    loaded = load({"cluster.processes": processes}, flags, file=job)
    if write:
        for note in write_cluster(loaded, write):
            say(plain(note), "note")
        say(plain(f"wrote {write}"))
        return 0
    rows = explained(loaded)
    if as_json:
        show_json({row.key: {"value": row.value, "from": row.origin} for row in rows})
    else:
        # At once: other processes write to the same place.
        show(map(plain, align([(row.name, row.text, row.origin) for row in rows])))
    return 0


def schema() -> int:
    """Print the JSON Schema of job.toml, for editors."""
    import json

    from manyhands.config.job import Job

    show(json.dumps(Job.model_json_schema(), indent=1))
    return 0
