"""manyhands logs."""

from typing import Annotated

from cyclopts import Parameter

from manyhands.cli.flags import Settings, settings
from manyhands.core.errors import UserError
from manyhands.core.shown import say, show


def logs(
    run: Annotated[str, Parameter(help="its folder, any part of the folder's name, or last")],
    /,
    *,
    rank: Annotated[int | None, Parameter(help="one process alone, without its rank before each line")] = None,
    follow: Annotated[bool, Parameter(name=["-f", "--follow"], negative="", help="go on until the run ends")] = False,
    last: Annotated[int, Parameter(help="so many lines of each process; 0: all")] = 0,
    set_: Settings = None,
) -> int:
    """Show what the processes of a run wrote."""
    from manyhands.run.find import find_run
    from manyhands.run.logs import show_logs

    if last < 0:
        raise UserError(f"--last is a number of lines, found {last}", "--last", ("--last 20",))
    try:
        show_logs(find_run(run), rank, last=last, follow=follow, show=show, say=say, settings=settings(set_ or []))
    except KeyboardInterrupt:
        return 0  # the usual way out of -f
    return 0
