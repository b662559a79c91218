"""manyhands train."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.cli.flags import (
    AsJson,
    Backend,
    Batch,
    Compile,
    Data,
    DataDir,
    Device,
    DryRun,
    Epochs,
    Lr,
    Mesh,
    Model,
    Out,
    Parallel,
    Pin,
    Pretrained,
    Processes,
    Quiet,
    Resume,
    Seed,
    Settings,
    ShowConfig,
    Sync,
)
from manyhands.cluster.inventory import Machine, Meeting
from manyhands.config.job import ClusterOptions
from manyhands.config.load import LoadedJob, known_keys, load_job, parse_value
from manyhands.core.errors import UserError


def train(  # noqa: PLR0913 - one argument for each flag
    data: Data = None,
    model: Model = None,
    /,
    *,
    processes: Processes = None,
    epochs: Epochs = None,
    batch: Batch = None,
    lr: Lr = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = None,
    data_dir: DataDir = None,
    parallel: Parallel = None,
    mesh: Mesh = None,
    pin: Pin = None,
    sync: Sync = None,
    init: Annotated[str | None, Parameter(help="meet other processes: tcp://HOST:PORT, file:///PATH, env://")] = None,
    world_size: Annotated[int | None, Parameter(help="with --init: processes over all machines")] = None,
    rank: Annotated[int | None, Parameter(help="with --init: this process, counted from 0")] = None,
    rank_table: Annotated[str | None, Parameter(help="Ascend's rank table, with this machine in it")] = None,
    cluster: Annotated[str | None, Parameter(help="a description of the cluster, with this machine in it")] = None,
    backend: Backend = None,
    device: Device = None,
    pretrained: Pretrained = None,
    compile_: Compile = None,
    set_: Settings = None,
    show_config: ShowConfig = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Train a classifier.

    Every option of the job can be given by its path, such as --train.momentum 0.8; --show-config lists them.
    """
    flags: dict[str, Any] = {
        "model.name": model,
        "cluster.processes": processes,
        "train.epochs": epochs,
        "train.batch": batch,
        "train.lr": lr,
        "train.seed": seed,
        "run.out": out,
        "checkpoint.resume": resume,
        "data.dir": data_dir,
        "parallel.mode": parallel or ("semi" if pin else None),
        "parallel.mesh": mesh,
        "parallel.pin": tuple(pin) if pin else None,
        "sync.method": sync,
        "cluster.init": init,
        "cluster.world_size": world_size,
        "cluster.rank": rank,
        "cluster.rank_table": rank_table,
        "cluster.file": cluster,
        "cluster.backend": backend,
        "cluster.device": device,
        "model.pretrained": pretrained,
        "train.compile": compile_,
    }
    job_file = Path(data) if data and data.endswith(".toml") else None
    if not job_file:
        flags["data.name"] = data
    loaded = load_job({**flags, **settings(set_ or [])}, file=job_file)
    if show_config:
        print_config(loaded)
        return 0
    return run(loaded, dry_run=dry_run, as_json=as_json, quiet=quiet)


def settings(words: list[str]) -> dict[str, Any]:
    """`key=value` words as values by dotted key.

    Raises:
        UserError: a word has no "=".
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f'"{word}" is not key=value', "--set", ("such as --set train.lr=0.05",))
        found[key.strip()] = parse_value(value)
    return found


def run(loaded: LoadedJob, *, dry_run: bool, as_json: bool, quiet: bool, meeting: Meeting | None = None) -> int:
    """Trains and prints the result."""
    if dry_run:
        from manyhands.run.check import check_names

        check_names(loaded.job)
        lines = describe(loaded)
        print(json.dumps({"dry_run": lines}, ensure_ascii=False) if as_json else "\n".join(lines))
        return 0
    from manyhands.report.summary import result_lines, result_object
    from manyhands.run.launch import start

    outcome = start(loaded.job, quiet=quiet, meeting=meeting)
    if not outcome.speaks:
        return outcome.exit_code
    found = outcome.read()
    if not quiet or not as_json:
        for line in result_lines(found):
            print(line, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(result_object(found), ensure_ascii=False))
    return outcome.exit_code


def describe(loaded: LoadedJob) -> list[str]:
    """What a run would do, as far as it can be told without the data."""
    job = loaded.job
    from manyhands.cluster.machines import machines_of

    machines = machines_of(job.cluster)
    who, starts = _on_machines(machines, job.cluster) if machines else (_taking_part(job.cluster), [])
    return [
        f"would train {job.model.name} on {job.data.name}: {job.train.epochs} epochs, {job.train.batch} samples per "
        f"update, {job.train.optimizer} with a peak rate of {job.train.lr}",
        f"as {who}",
        f"into {job.run.out or 'runs/<date>-<data>-<model>'}",
        *starts,
    ]


def _on_machines(machines: Sequence[Machine], options: ClusterOptions) -> tuple[str, list[str]]:
    """Who takes part, and the command that starts the agent on each other machine."""
    from manyhands.cluster.own import is_here
    from manyhands.cluster.ssh import agent_script, ssh_words

    names = ", ".join(f"{machine.name}:{machine.slots}" if machine.slots else machine.name for machine in machines)
    ssh = shlex.join(ssh_words(options))
    starts = [
        f"{machine.name}: {'this machine' if is_here(machine) else f'{ssh} -- {machine.host} SCRIPT'}"
        for machine in machines
    ]
    script = agent_script(options, Path.cwd()).splitlines()
    return f"processes on {names}", [*starts, "SCRIPT, by sh:", *(f"  {line}" for line in script)]


def _taking_part(options: ClusterOptions) -> str:
    from manyhands.cluster.rendezvous import participate

    place = participate(options)
    count = place.processes
    who = f"{count} process{'es' if count > 1 else ''}" if count else "one process, or one for each accelerator"
    if place.meeting:
        who += f" on machine {place.meeting.machine} of {len(place.meeting.sizes)}, by {place.origins['size']}"
    elif place.membership:
        found = place.membership
        by = f"meeting at {found.init}" if found.started_by == "--init" else f"by {found.started_by}"
        who = f"rank {found.rank} of {found.size}, {by}"
    else:
        who += " on this machine"
    return who


def print_config(loaded: LoadedJob) -> None:
    """Every value of the job and where it came from, as TOML with comments."""
    values = loaded.job.model_dump(mode="json")
    section = ""
    for key in known_keys():
        name, _, option = key.partition(".")
        if name != section:
            print(f"{'' if not section else chr(10)}[{name}]")
            section = name
        line = f"{option} = {json.dumps(values[name][option], ensure_ascii=False)}"
        print(f"{line:<40} # {loaded.origins.get(key, 'default')}")
