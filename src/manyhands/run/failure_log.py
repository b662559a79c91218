"""What the command that watches a run writes of its end: first causes, and what no process of the run can tell."""

import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from manyhands.cluster.hosts.machines import machines_of
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_SAVED, ManyhandsError
from manyhands.core.records import REPLACED, Event, Failure, append, read_lines, write_json
from manyhands.core.resuming import saved_step, unsaved
from manyhands.core.run_folder import RunFolder

# What says whether the processes of the last start have come to a stop.
_TURNS = {"started", "stopping", "stopped"}


def interrupted(folder: RunFolder, hung: str = "", *, idle: bool = False) -> ManyhandsError:
    """Records and returns the error of a run that the user stopped without a save; see `core.resuming.unsaved`."""
    step = saved_step(folder)
    error = unsaved(folder.path, step, hung, idle=idle)
    kind = "stopped" if error.exit_code == EXIT_SAVED else "interrupted"
    _note(folder, Event(time=time.time(), kind=kind, step=step, message=error.message, data={"rankless": True}))
    return error


def starts_and_stops(folder: RunFolder) -> list[dict[str, Any]]:
    """Events that say whether the processes of a start have stopped."""
    return [line for line in read_lines(folder.events) if line.get("kind") in _TURNS]


def stop_saved(folder: RunFolder, earlier: int = 0) -> int | None:
    """The step of the checkpoint that the processes made to stop, where it was committed; its event is noted too.

    A process that is killed after that, or a machine that is lost, takes nothing away. The first `earlier` events of
    `starts_and_stops` belong to commands before this one.
    """
    last = next(iter(starts_and_stops(folder)[earlier:][-1:]), {})
    step, saved = last.get("step"), saved_step(folder)
    if last.get("kind") not in {"stopping", "stopped"} or step is None or saved is None or saved < step:
        return None
    if last.get("kind") == "stopping":
        _note(folder, Event(time=time.time(), kind="stopped", step=step, message=f"stopped and saved at step {step}"))
    return step


def note_replaced(folder: RunFolder, message: str) -> None:
    """That this head is obeyed no more; how the run goes on is in its new head's folder."""
    _note(folder, Event(time=time.time(), kind=REPLACED, step=saved_step(folder), message=message))


def note_cause(folder: RunFolder, cause: Failure) -> None:
    """A first cause, and in full where the process couldn't leave its record itself."""
    _note(
        folder,
        Event(
            time=cause.time,
            kind="failed",
            rank=cause.rank,
            step=cause.step,
            message=cause.what,
            data={"host": cause.host},
        ),
    )
    with suppress(OSError):
        record = folder.failures / f"{cause.rank}.json"
        if not record.exists():
            write_json(record, cause)


def note_head(job: Job, folder: RunFolder, error: Exception) -> None:
    """What failed on no rank: a machine that could not be used, or the watch itself."""
    known = isinstance(error, ManyhandsError)
    what = error.message if known else f"{type(error).__name__}: {error}"
    where, hints = (error.where, [*error.hints]) if known else ("", [])
    host = where if where in {machine.name for machine in machines_of(job.cluster)} else ""
    data = {"rankless": True, "host": host, "where": where, "hints": hints}
    _note(folder, Event(time=time.time(), kind="failed", message=what, data=data))


@contextmanager
def ends_noted(job: Job, folder: RunFolder) -> Generator[None]:
    """Records in the run's events what ends the block while no process trains: a failure or a request to stop.

    Raises:
        ManyhandsError: the user stopped it.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        # A second one comes while the first still ends what was begun.
        raise interrupted(folder, idle=not isinstance(interrupt.__context__, KeyboardInterrupt)) from None
    except Exception as error:
        note_head(job, folder, error)
        raise


def _note(folder: RunFolder, event: Event) -> None:
    """A disk that can't be written must not hide what is to be noted, which the user hears anyway."""
    with suppress(OSError):
        append(folder.events, event)
