"""Setup of data-loading worker processes, which exit when their parent exits."""

import ctypes
import os
import signal
import sys
import threading
import traceback
import warnings
from multiprocessing.queues import Queue
from typing import Any

from manyhands.core.errors import RunError
from manyhands.core.stops import STOPS

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def set_up_worker(_number: int, *, parent: int, end_with_thread: bool) -> None:
    """Makes this worker process exit when its parent exits, and ignore stop signals except SIGTERM from the parent.

    A stop signal reaches the entire process group, but the parent needs its workers until it has saved a checkpoint.
    With `end_with_thread`, the kernel kills the worker when the parent's thread that started it ends. Otherwise, files
    and ports stay open for seconds. Set it only if that thread lives as long as the parent, whose pid is `parent`.
    """
    for number in {*STOPS} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
        if end_with_thread:
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
    Queue._on_queue_feeder_error = _answer_with_error  # pyright: ignore[reportAttributeAccessIssue]  # of this process
    warnings.filterwarnings("ignore", module="PIL")  # about broken EXIF data and the like, once per worker


def _answer_with_error(answers: Any, error: Exception, answer: tuple[int, Any]) -> None:
    """Sends an error in place of `answer`, which can't be sent. Exits if `answer` is an error itself."""
    traceback.print_exc()
    number, content = answer
    if isinstance(content, RunError):
        os._exit(1)
    hints = ("free space in /dev/shm, shorten TMPDIR, raise ulimit -n, or use --data.workers 0",)
    what = f"a data-loading process can't send its samples: {type(error).__name__}: {error}"
    answers.put((number, RunError(what, "data.workers", hints)))


def _exit_with_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        continue
    os._exit(0)
