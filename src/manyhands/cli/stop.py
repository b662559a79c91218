"""manyhands stop."""

from typing import Annotated

from cyclopts import Parameter

from manyhands.core.errors import EXIT_FAILED, EXIT_OK
from manyhands.core.terminal import say, show


def stop(
    run: Annotated[str, Parameter(help="a run's folder, part of its name, or last")],
    /,
    *,
    now: Annotated[bool, Parameter(negative="", help="end the run at once, without saving")] = False,
) -> int:
    """Ask an active run to save and stop, and wait for its end."""
    from manyhands.core.resuming import resume_command, saved_step
    from manyhands.run.find import find_run, head_of_active
    from manyhands.run.stop import stop_headless, stop_run

    folder = find_run(run, active=True)
    try:
        headless = stop_headless(folder, say, now=now)
        end = None if headless else stop_run(head_of_active(folder), say, now=now)
    except KeyboardInterrupt:
        say("the run still ends; only this command stops waiting")
        raise
    path, saved = folder.path, saved_step(folder)
    if headless and saved is None and not now:
        show(f"the processes of {path} have saved and stopped; their checkpoint is on other machines of the run")
        return EXIT_OK
    kept = "nothing was saved" if saved is None else f"the last checkpoint, of step {saved}, is intact"
    show(f"{path} {end.message or end.kind}" if end else f"{path} has ended{' here' if headless else ''}; {kept}")
    if saved is None:
        show("there is no checkpoint to resume; run the same command to start from scratch")
    elif end is None or end.kind != "finished":
        show(f"resume {resume_command(path)}")
    return EXIT_FAILED if end and end.kind == "failed" else EXIT_OK
