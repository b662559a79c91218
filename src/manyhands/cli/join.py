"""manyhands join."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manyhands.cli.flags import settings
from manyhands.core.errors import EXIT_OK, UserError
from manyhands.core.shown import show


def join(
    run: Annotated[str, Parameter(name="RUN", help="of this machine's head; elsewhere HEAD:RUN, as for scp")],
    /,
    *,
    host: Annotated[
        str | None, Parameter(help="the machine, as the head reaches it: n4, user@n4, ssh://n4:31234")
    ] = None,
    back: Annotated[str | None, Parameter(show=False)] = None,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", help="how HEAD is reached: --cluster.ssh 'ssh -i key' …"),
    ] = None,
) -> int:
    """Have a run that goes on take up another machine; typed there, HEAD:RUN says where its head is."""
    from manyhands.run.join import join_from_here, join_here, seen_at
    from manyhands.run.watch import without_last

    if ":" in run and not Path(run).exists():
        from manyhands.config.load import load_job

        return join_from_here(run, host or "", load_job(settings(set_ or [])).job.cluster)
    if not host and not back:
        raise UserError("no machine is named", "manyhands join", ("--host n4", "typed on that machine: join HEAD:RUN"))
    show(join_here(without_last(run), host or seen_at(back or "")))
    return EXIT_OK
