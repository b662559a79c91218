"""Turns whatever ended a process into a record that a tired person understands."""

import os
import socket
import time
import traceback

import torch
import torch.distributed as dist

from manyhands.core.errors import ManyhandsError
from manyhands.core.records import Failure

# What torch says on a process whose peer has gone. Such an error is a consequence, not a cause.
CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "recvBytes failed",
    "failed to recv",
    "connectFullMesh",
    "remote process exited",
    "Socket closed",
)


def describe_failure(error: BaseException, *, rank: int, step: int | None, phase: str) -> Failure:
    """The record of a failure on this process."""
    known = error if isinstance(error, ManyhandsError) else None
    text = "".join(traceback.format_exception(error))
    what = known.what if known else f"{type(error).__name__}: {error}".strip()
    return Failure(
        time=time.time(),
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        step=step,
        phase=phase,
        exit_code=known.exit_code if known else 1,
        error=type(error).__name__,
        what=what,
        where=known.where if known else "",
        mend=list(known.mend) if known else [],
        traceback="" if known and known.__cause__ is None else text,
        consequence=is_consequence(error),
    )


def is_consequence(error: BaseException) -> bool:
    """True when the error says no more than that a peer has gone."""
    if isinstance(error, ManyhandsError):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CONSEQUENCES)


def is_out_of_memory(error: BaseException) -> bool:
    """True when a device or the machine had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
