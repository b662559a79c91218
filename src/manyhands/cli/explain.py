"""manyhands explain."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.cli.flags import Backend, Device, Settings, settings
from manyhands.core.terminal import plain, say, show, show_json


def explain(  # noqa: PLR0913 - one argument for each flag
    job: Annotated[Path | None, Parameter(help="a job.toml")] = None,
    /,
    *,
    processes: Annotated[int | None, Parameter(name=["-n", "--processes"], help="processes on this machine")] = None,
    init: Annotated[str | None, Parameter(help="rendezvous URL: tcp://HOST:PORT, file:///PATH or env://")] = None,
    world_size: Annotated[int | None, Parameter(help="with --init: number of processes on all machines")] = None,
    rank: Annotated[int | None, Parameter(help="with --init: rank of this process, counted from 0")] = None,
    rank_table: Annotated[str | None, Parameter(help="Ascend rank table that lists this machine")] = None,
    cluster: Annotated[str | None, Parameter(help="cluster file that lists this machine")] = None,
    device: Device = None,
    backend: Backend = None,
    write: Annotated[
        Path | None,
        Parameter(help="write the machines to a new file and exit: *.json is a rank table, others a hostfile"),
    ] = None,
    set_: Settings = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="print one JSON object")] = False,
) -> int:
    """Show the rank, world size, master address and device of this process, and where each value comes from.

    Run explain in place of train, for example: srun manyhands explain.
    """
    from manyhands.config.load import load_job
    from manyhands.run.explain import explained, write_cluster

    flags: dict[str, Any] = {
        "cluster.processes": processes,
        "cluster.init": init,
        "cluster.world_size": world_size,
        "cluster.rank": rank,
        "cluster.rank_table": rank_table,
        "cluster.file": cluster,
        "cluster.device": device,
        "cluster.backend": backend,
    }
    loaded = load_job({**flags, **settings(set_ or [])}, file=job)
    if write:
        for note in write_cluster(loaded, write):
            say(plain(note), "note")
        say(plain(f"wrote {write}"))
        return 0
    rows = explained(loaded)
    if as_json:
        show_json({row.key: {"value": row.value, "from": row.origin} for row in rows})
        return 0
    keys, values = max(len(row.name) for row in rows), max(len(row.text) for row in rows)
    # At once: other processes write to the same place.
    show(plain(f"{row.name:<{keys}}  {row.text:<{values}}  {row.origin}").rstrip() for row in rows)
    return 0
