"""The signals that ask a run to save and stop, and a block that they end while there is nothing to save."""

import contextlib
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any, cast

from manyhands.core.errors import EXIT_INTERRUPTED, EXIT_SAVED, ManyhandsError
from manyhands.core.folder import RunFolder
from manyhands.core.outside import parse_json, read_bytes
from manyhands.core.records import read_lines
from manyhands.core.resuming import resume_command

Handler = Callable[[int, FrameType | None], Any]

# Ctrl-C; schedulers' word; a closed terminal; what schedulers send some time before the end. Not all systems have all.
STOPS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
# Those that this process has received, in order.
RECEIVED: list[int] = []
# Handlers of the open blocks, innermost last; a block off the main thread has one too.
_OPEN: list[Handler] = []


@contextlib.contextmanager
def handled(handler: Handler) -> Generator[dict[signal.Signals, Any]]:
    """Installs a handler for each of `STOPS`, in the main thread only.

    A SIGHUP that is ignored (by `nohup`) stays ignored. Handlers installed outside Python stay, since they could not
    be restored.

    Yields:
        The previous handlers, which are restored after the block.
    """

    def receive(number: int, frame: FrameType | None) -> Any:
        RECEIVED.append(number)
        return handler(number, frame)

    previous: dict[signal.Signals, Any] = {}
    for number in STOPS:
        before = signal.getsignal(number)
        nohup = number.name == "SIGHUP" and before is signal.SIG_IGN
        with contextlib.suppress(ValueError):  # only the main thread may
            if not nohup and before is not None:
                previous[number] = signal.signal(number, receive)
    _OPEN.append(handler)
    try:
        yield previous
    finally:
        _OPEN.remove(handler)
        for number, before in previous.items():
            signal.signal(number, before)


def request_stop() -> bool:
    """Asks the innermost block for a stop as SIGTERM does, from any thread; False while nothing there could save."""
    if not _OPEN or _OPEN[-1] is signal.default_int_handler:
        return False
    _OPEN[-1](signal.SIGTERM, None)
    return True


def ended_like_ctrl_c() -> contextlib.AbstractContextManager[object]:
    """Every signal that asks for a stop ends the block as Ctrl-C does, so that what was begun is cleaned up."""
    return handled(signal.default_int_handler)


@contextlib.contextmanager
def held_back() -> Generator[None]:
    """Delays stop signals until after the block: an interrupted import of torch cannot be repeated."""
    received: list[int] = []
    with handled(lambda number, _frame: received.append(number)):
        yield
    if received:
        signal.raise_signal(received[0])


def saved_step(folder: RunFolder) -> int | None:
    """The newest step that was saved, here or on the machine of rank 0; None where nothing was."""
    recorded = [line.get("step") for line in read_lines(folder.events) if line.get("kind") == "saved"]
    steps = saved_steps(folder) or [step for step in recorded if isinstance(step, int)]
    return max(steps, default=None)


def kept_step(folder: RunFolder) -> int | None:
    """The newest step that a checkpoint is left of; None where all were removed."""
    return saved_step(folder) if saved_steps(folder) or _saves_elsewhere(folder) else None


def saved_steps(folder: RunFolder) -> list[int]:
    """The steps of the checkpoints in a folder."""
    names = [path.name.removeprefix("step-") for path in folder.checkpoints.glob("step-*")]
    return [int(name) for name in names if name.isdecimal()]


def _saves_elsewhere(folder: RunFolder) -> bool:
    """True where checkpoints are on the disk of another machine, that of rank 0."""
    try:
        places = cast(list[dict[str, Any]], parse_json(read_bytes(folder.machines)))
        return not places[0]["local"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def unsaved(run: Path, step: int | None, why: str = "", *, idle: bool = False) -> ManyhandsError:
    """The error of a run that ended at the user's wish without a save.

    Args:
        run: its folder.
        step: that was saved last; None where nothing was.
        why: it could not be saved, where there was no second wish.
        idle: no process was training just then, so that there was nothing to save.
    """
    since = f" (could not save: {why})" if why else ""
    if step is None:
        hints = ("run the same command again to start from the beginning",)
        error = ManyhandsError(f"stopped before anything was saved{since}", hints=hints)
    else:
        how = "while no process was training" if idle else f"without a save{since}"
        what = f"stopped {how}; the last checkpoint is step {step}"
        error = ManyhandsError(what, hints=(f"resume from step {step}: {resume_command(run)}",))
    error.exit_code = EXIT_SAVED if idle and step is not None else EXIT_INTERRUPTED
    return error
