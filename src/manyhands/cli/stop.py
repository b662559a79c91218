"""manyhands stop."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manyhands.core.errors import EXIT_FAILED, EXIT_OK
from manyhands.core.shown import say, show


def stop(
    run: Annotated[str, Parameter(help="its folder, the folder's name, or the beginning of that")],
    /,
    *,
    now: Annotated[bool, Parameter(negative="", help="end it at once; what isn't saved is lost")] = False,
) -> int:
    """Have a run that goes on save and stop, and wait for it."""
    from manyhands.core.folder import RunFolder
    from manyhands.core.going_on import going_on
    from manyhands.core.stops import saved_step
    from manyhands.run.watch import find_running, stop_run

    record = find_running(run)
    try:
        end = stop_run(record, say, now=now)
    except KeyboardInterrupt:
        say("the run was asked to stop and will; this command only waited for it")
        raise
    saved = saved_step(RunFolder(Path(record.run)))
    kept = "nothing was saved" if saved is None else f"what was saved last, at step {saved}, is whole"
    show(f"{record.run} {end.message or end.kind}" if end else f"{record.run} has ended; {kept}")
    if saved is None:
        show("nothing is there to resume; the command that started it begins anew")
    elif end is None or end.kind != "finished":
        show(f"go on  {going_on(Path(record.run))}")
    return EXIT_FAILED if end and end.kind == "failed" else EXIT_OK
