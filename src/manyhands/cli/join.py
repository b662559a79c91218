"""manyhands join."""

from typing import Annotated

from cyclopts import Parameter

from manyhands.core.errors import EXIT_OK, UserError
from manyhands.core.shown import show


def join(
    run: Annotated[str, Parameter(name="RUN", help="of this machine's head: its folder, a part of its name, or last")],
    /,
    *,
    host: Annotated[
        str | None, Parameter(help="the machine, as the head reaches it: n4, user@n4, ssh://n4:31234")
    ] = None,
) -> int:
    """Have a run that goes on take up another machine; typed on the machine of the run's head."""
    from manyhands.run.join import join_here

    if not host:
        raise UserError("no machine is named", "manyhands join", ("--host n4",))
    show(join_here(run, host))
    return EXIT_OK
