"""manyhands join."""

from typing import Annotated

from cyclopts import Parameter

from manyhands.core.errors import EXIT_OK, UserError
from manyhands.core.terminal import show


def join(
    run: Annotated[str, Parameter(name="RUN", help="a run launched from here: folder, part of its name, or last")],
    /,
    *,
    host: Annotated[
        str | None, Parameter(help="the machine to add, as ssh on this machine reaches it: n4, user@n4, ssh://n4:31234")
    ] = None,
) -> int:
    """Add a machine to an active run. Run join on the machine that launched the run."""
    from manyhands.run.join import join_here

    if not host:
        raise UserError("no machine is named", "manyhands join", ("name the machine: --host n4",))
    show(join_here(run, host))
    return EXIT_OK
