"""manyhands logs."""

from typing import Annotated

from cyclopts import Parameter

from manyhands.cli.flags import Settings, settings
from manyhands.core.errors import UserError
from manyhands.core.terminal import say, show


def logs(
    run: Annotated[str, Parameter(help="a run's folder, part of its name, or last")],
    /,
    *,
    rank: Annotated[int | None, Parameter(help="show only this rank, without the rank before each line")] = None,
    follow: Annotated[bool, Parameter(name=["-f", "--follow"], negative="", help="follow until the run ends")] = False,
    last: Annotated[int, Parameter(help="number of last lines to show of each process; 0: all")] = 0,
    set_: Settings = None,
) -> int:
    """Show the output of the processes of a run."""
    from manyhands.run.find import find_run
    from manyhands.run.logs import show_logs

    if last < 0:
        raise UserError(f"--last must be 0 or more, found {last}", "--last", ("use --last 20, for example",))
    try:
        show_logs(find_run(run), rank, last=last, follow=follow, show=show, say=say, settings=settings(set_ or []))
    except KeyboardInterrupt:
        return 0  # the usual way out of -f
    return 0
