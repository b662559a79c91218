"""The commands that check machines and options: doctor, explain and schema."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from manyhands.cli.flags import Data, DoctorFlags, ExplainFlags, Help, Int, Json, Model, load, parse_names
from manyhands.cli.printing import align, print_answer
from manyhands.core.errors import EXIT_DOCTOR, EXIT_OK
from manyhands.core.terminal import plain, say, show, show_json

if TYPE_CHECKING:
    from manyhands.cluster.doctor.findings import Survey
    from manyhands.run.doctor import Diagnosis

MARKS = {"fail": ("✗", "bold red"), "warn": ("!", "yellow"), "ok": ("✓", "green")}


def doctor(
    data: Data = None,
    model: Model = None,
    /,
    *,
    flags: DoctorFlags = DoctorFlags(),
    exposure: Annotated[
        bool, Help("list only the open ports and the machines that can reach them, now and during a job")
    ] = False,
    as_json: Json = False,
) -> int:
    """Check whether a job can train, here or on many machines; takes seconds and changes nothing.

    Exits with code 3 if training would fail.
    """
    from manyhands.run.folder import announce_ssh_command

    values, file = parse_names(data, model)
    loaded = load(values, flags, file=file)
    announce_ssh_command(loaded)
    if exposure:
        from manyhands.run.doctor import exposure as find_exposure

        found = find_exposure(loaded.job, say)
        print_answer(found.as_json(), found.lines(), json=as_json)
        return EXIT_DOCTOR if found.why_not else EXIT_OK
    from manyhands.run.doctor import diagnose

    diagnosis = diagnose(loaded.job, say)
    if as_json:
        show_json(diagnosis.as_json())
    else:
        _print_diagnosis(diagnosis)
    return diagnosis.exit_code


def _print_diagnosis(diagnosis: "Diagnosis") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for finding in diagnosis.findings:
        mark, style = MARKS[finding.severity]
        console.print(Text(f"{mark} {plain(finding.what)}", style=style))
        for number, line in enumerate(finding.hints):
            console.print(Text(f"    {'do:' if number == 0 else '   '} {plain(line)}"))
    for line in _link_table(diagnosis.survey):
        console.print(Text(plain(line)))
    fails, warnings = (sum(found.severity == word for found in diagnosis.findings) for word in ("fail", "warn"))
    where = f"on {len(diagnosis.survey.hosts)} machines" if len(diagnosis.survey.hosts) > 1 else "here"
    summary = f"training {where} should work" + (f"; warnings: {warnings}" if warnings else "")
    if fails:
        summary = f"training {where} would fail; problems to fix first: {fails}"
    console.print(Text(summary, style="bold"))


def _link_table(survey: "Survey") -> list[str]:
    """Formats the bandwidth and latency between each pair of machines as a table; [] if nothing was measured."""
    if not survey.mbps:
        return []
    rows = [["Mbit/s (ms)", *(f"to {host}" for host in survey.hosts)]]
    for one in survey.hosts:
        rows.append([f"from {one}"])
        for two in survey.hosts:
            mbps, latency = survey.mbps.get((one, two)), survey.latency_ms.get((one, two))
            if mbps is None:
                rows[-1].append("·" if one == two else "?")
            else:
                speed = f"{mbps:.3g}" if mbps < 1000 else f"{mbps:.0f}"
                rows[-1].append(speed if latency is None else f"{speed} ({latency:.2f})")
    return ["", *align(rows, left=1), ""]


def explain(
    job: Annotated[Path | None, Help("a job.toml")] = None,
    /,
    *,
    processes: Annotated[Int | None, Help("number of processes on this machine", "-n", "--processes")] = None,
    flags: ExplainFlags = ExplainFlags(),
    write: Annotated[
        Path | None, Help("write the machines to this new file and exit; *.json: a rank table; else: a hostfile")
    ] = None,
    as_json: Json = False,
) -> int:
    """Show the rank, world size, master address and device of this process, and where each value comes from.

    Run explain in place of train, for example: srun manyhands explain.
    """
    from manyhands.run.explain import explain_values, write_cluster

    loaded = load({"cluster.processes": processes}, flags, file=job)
    if write:
        for note in write_cluster(loaded, write):
            say(plain(note), "note")
        say(plain(f"wrote {write}"))
        return 0
    rows = explain_values(loaded)
    print_answer(
        {row.key: {"value": row.value, "from": row.origin} for row in rows},
        map(plain, align([(row.key.replace("_", " "), row.text, row.origin) for row in rows])),
        json=as_json,
    )
    return 0


def schema() -> int:
    """Print the JSON Schema of job.toml, for editors."""
    import json

    from manyhands.config.job import Job

    show(json.dumps(Job.model_json_schema(), indent=1))
    return 0
