"""manyhands stop."""

from typing import Annotated

from cyclopts import Parameter

from manyhands.core.errors import EXIT_FAILED, EXIT_OK
from manyhands.core.shown import say, show


def stop(
    run: Annotated[str, Parameter(help="its folder, any part of the folder's name, or last")],
    /,
    *,
    now: Annotated[bool, Parameter(negative="", help="end it at once; what isn't saved is lost")] = False,
) -> int:
    """Have a run that goes on save and stop, and wait for it."""
    from manyhands.core.going_on import going_on
    from manyhands.core.stops import saved_step
    from manyhands.run.find import find_run, head_of_active
    from manyhands.run.stop import stop_headless, stop_run

    folder = find_run(run, active=True)
    try:
        headless = stop_headless(folder, say, now=now)
        end = None if headless else stop_run(head_of_active(folder), say, now=now)
    except KeyboardInterrupt:
        say("the run was asked to stop and will; this command only waited for it")
        raise
    path, saved = folder.path, saved_step(folder)
    if headless and saved is None and not now:
        show(f"the processes of {path} have saved and left; what they saved is on other machines of the run")
        return EXIT_OK
    kept = "nothing was saved" if saved is None else f"what was saved last, at step {saved}, is whole"
    show(f"{path} {end.message or end.kind}" if end else f"{path} has ended{' here' if headless else ''}; {kept}")
    if saved is None:
        show("nothing is there to resume; the command that started it begins anew")
    elif end is None or end.kind != "finished":
        show(f"go on  {going_on(path)}")
    return EXIT_FAILED if end and end.kind == "failed" else EXIT_OK
