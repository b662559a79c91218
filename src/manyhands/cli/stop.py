"""manyhands stop."""

import sys
from typing import Annotated

from cyclopts import Parameter

from manyhands.core.errors import EXIT_FAILED, EXIT_OK
from manyhands.run.watch import find_running, stop_run


def stop(
    run: Annotated[str, Parameter(help="its folder, the folder's name, or the beginning of that")],
    /,
    *,
    now: Annotated[bool, Parameter(negative="", help="end it at once; what isn't saved is lost")] = False,
) -> int:
    """Have a run that goes on save and stop, and wait for it."""
    record = find_running(run)
    try:
        end = stop_run(record, _say, now=now)
    except KeyboardInterrupt:
        _say("the run was asked to stop and will; this command only waited for it")
        raise
    if end is None:
        print(f"{record.run} has ended; its last checkpoint, if any, is whole")
    else:
        print(f"{record.run} {end.message or end.kind}")
    if end is None or end.kind != "finished":
        print(f"go on  manyhands resume {record.run}")
    return EXIT_FAILED if end and end.kind == "failed" else EXIT_OK


def _say(text: str) -> None:
    sys.stderr.write(f"manyhands: {text}\n")
    sys.stderr.flush()
