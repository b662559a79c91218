"""The commands that train: train, launch, resume and profile."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyhands.cli import flags
from manyhands.cli.printing import align, print_config
from manyhands.core.errors import UserError
from manyhands.core.terminal import plain, say, show, show_json

if TYPE_CHECKING:
    from manyhands.config.load import LoadedJob
    from manyhands.report.read import RunData


def train(
    data: flags.Data = None,
    model: flags.Model = None,
    /,
    *arguments: flags.Arguments,
    processes: flags.Processes = None,
    job: flags.JobFlags = flags.JobFlags(),
    place: flags.ProcessFlags = flags.ProcessFlags(),
    run: flags.RunFlags = flags.RunFlags(),
) -> int:
    """Train a classifier.

    Every option of the job is also a flag, such as --train.momentum 0.8; --show-config lists all options.
    """
    values, file = job_or_script(data, model, arguments)
    loaded = flags.load(values | {"cluster.processes": processes}, job, place, run, file=file, recipe=job.recipe)
    return _run(loaded, run)


def _run(loaded: "LoadedJob", run: flags.RunFlags, *, resume_hint: bool = False) -> int:
    if run.show_config:
        return print_config(loaded)
    from manyhands.cli.training import run_job

    return run_job(loaded, run, resume_hint=resume_hint)


def launch(
    data: flags.Data = None,
    model: flags.Model = None,
    /,
    *arguments: flags.Arguments,
    machines: flags.LaunchFlags = flags.LaunchFlags(),
    job: flags.JobFlags = flags.JobFlags(),
    run: flags.RunFlags = flags.RunFlags(),
) -> int:
    """Train on several machines, started and monitored from here over ssh; or submit the job to a scheduler."""
    values, file = job_or_script(data, model, arguments)
    loaded = flags.load(values, machines, job, run, file=file, recipe=job.recipe)
    cluster, script = loaded.job.cluster, loaded.job.run.script
    if run.show_config:
        return print_config(loaded)
    if cluster.on and script:
        wrong = f"a script of your own can't be submitted to {cluster.on}"
        hints = ("name the machines: --hosts n1,n2", "or start the script without manyhands: srun, torchrun")
        raise UserError(wrong, "--on", hints)
    if cluster.on:
        from manyhands.run.submit import submit

        show(submit(loaded.job, file, cluster.on, dry_run=run.dry_run))
        return 0
    if not cluster.hosts and not cluster.hostfile:
        hints = ("add --hosts n1,n2 or --hostfile FILE", "or --on slurm")
        raise UserError("no machines are named", "manyhands launch", hints)
    return _run(loaded, run)


def job_or_script(data: str | None, model: str | None, arguments: Sequence[str]) -> tuple[dict[str, Any], Path | None]:
    """Returns (options that name data and network or a script, by dotted key; path of the job.toml or None)."""
    if data and data.endswith(".py"):
        return {"run.script": (data, *filter(None, (model,)), *arguments)}, None
    words = [word for word in (data, model, *arguments) if word and re.match(r"[A-Za-z_][\w.]*=", word)]
    if words and not any(Path(word).exists() for word in words):
        from manyhands.config.load import meant_key

        pairs = [word.split("=", 1) for word in words]
        written = " ".join(f"--{meant_key(name) or name} {value}" for name, value in pairs)
        raise UserError("options are flags, not key=value", "command line", (f"write {written}",))
    if arguments:
        hints = ("pass arguments only to a script of your own: manyhands train train.py -n 2 -- ARGUMENTS",)
        raise UserError(f'unexpected argument "{arguments[0]}"', "command line", hints)
    return flags.parse_names(data, model)


def resume(
    name: flags.RunName, /, *, changes: flags.ResumeFlags = flags.ResumeFlags(), run: flags.RunFlags = flags.RunFlags()
) -> int:
    """Resume a stopped or failed run at the exact next sample, on any number of processes."""
    from manyhands.run.folder import load_resumed

    values = {"cluster.debug_rank": -1}
    for group in (changes, run):
        values |= {key: value for key, value in group.job_values().items() if value is not None}
    loaded = load_resumed(name, values)
    return _run(loaded, run, resume_hint=True)


def profile(
    run: Annotated[
        str | None,
        flags.Help("a run to analyse (folder, start of its name, or last), or a data set or job.toml to trace"),
    ] = None,
    model: flags.Model = None,
    /,
    *,
    steps: Annotated[flags.Int, flags.Help("number of updates to train and trace; unused if RUN is a run")] = 20,
    processes: flags.Processes = None,
    job: flags.JobFlags = flags.JobFlags(),
    output: flags.RunFlags = flags.RunFlags(),
) -> int:
    """Show where each process of a run spends its time, and the change that would help most.

    manyhands profile RUN            reads the records of the run
    manyhands profile DATA MODEL …   trains for some updates and writes a trace for Perfetto
    """
    from manyhands.run.registry import read_run_named
    from manyhands.run.train import trace_training

    found = read_run_named(run) if run and not model else None
    if found:
        _print_profile(found, as_json=output.as_json)
        return 0
    if steps < 1:
        raise UserError(f"--steps must be 1 or more, found {steps}", "--steps", ("use --steps 20, for example",))
    values, file = flags.parse_names(run, model)
    loaded = flags.load(values | {"cluster.processes": processes}, job, output, file=file, recipe=job.recipe)
    if output.show_config or output.dry_run:
        return _run(loaded, output)
    outcome = trace_training(loaded.job, steps, quiet=output.quiet)
    if outcome.is_main and not outcome.exit_code:
        _print_profile(outcome.read(), as_json=output.as_json)
    return outcome.exit_code


def _print_profile(run: "RunData", *, as_json: bool) -> None:
    from manyhands.report import time_shares

    ranks, change, trace = time_shares.seconds_by_rank(run), time_shares.best_change(run), run.folder.trace
    if as_json:
        suggestion = {"what": change.what, "gain": change.gain} if change else None
        more = {"trace": str(trace)} if trace.is_file() else {}
        shares = time_shares.samples_by_rank(run)
        show_json({"run": str(run.folder.path), "ranks": ranks, "shares": shares, "change": suggestion, **more})
        return
    if not change:
        show("the run has no time records yet; the first record is written after 30 s or one epoch")
        return
    rows = {str(rank): seconds for rank, seconds in enumerate(ranks)}
    if len(rows) > 1:
        rows["mean"] = time_shares.mean_over_ranks(ranks)
    lines = [["rank", "seconds", *ranks[0]]]
    for name, seconds in rows.items():
        shares = time_shares.time_fractions(seconds)
        cells = [f"{value:.1f} s {shares[phase]:4.0%}" for phase, value in seconds.items()]
        lines.append([name, f"{sum(seconds.values()):.1f}", *cells])
    show(align(lines, left=0))
    if unequal := time_shares.unequal_line(run):
        show(unequal)
    show(plain(f"would help most: {time_shares.change_line(run)}"))
    if trace.is_file():
        say(f"open {trace} in https://ui.perfetto.dev")
