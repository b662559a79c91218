"""Turns whatever ended a process into a record that a tired person understands."""

import os
import socket
import time
import traceback
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from manyhands.core.errors import ManyhandsError, RunError
from manyhands.core.records import Failure

if TYPE_CHECKING:
    from manyhands.train.job import Parts

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


def explain_memory(error: BaseException, parts: "Parts") -> RunError:
    """The error for a lack of memory: says which micro-batch fits, by trying smaller ones on this process."""
    share = -(-parts.feed.order.batch // parts.world.size)
    taken = min(parts.job.train.micro_batch or share, share)
    fits = _largest_that_fits(parts, taken)
    mend = [f"--set train.micro_batch={fits}: the global batch stays {parts.job.train.batch}"] if fits else []
    if fits and isinstance(parts.job.train.norm_group, int) and fits < parts.job.train.norm_group:
        mend.append(f"with --set train.norm_group={max(2, fits)}, since BatchNorm needs a group in one pass")
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    return RunError(
        f"out of memory at {taken} pictures in one pass: {first_line[:200]}",
        f"rank {parts.world.rank} on {socket.gethostname()}, {parts.world.device}",
        (*mend, "or a smaller image_size, or --set train.precision=bf16"),
    )


def _largest_that_fits(parts: "Parts", taken: int) -> int:
    """Halves the pass until it fits; 0 when not even one picture does."""
    update, size = parts.update, taken // 2
    while size >= 1:
        update.optimizer.zero_grad(set_to_none=True)
        try:
            samples = torch.arange(size) % parts.feed.order.length
            batch = next(iter(parts.feed.loader.batches(0, [samples])))
            update.norm.begin_pass((), (), size, size)
            loss, _ = update.criterion(parts.network.inner(batch.images), batch.labels)
            loss.backward()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                return 0
            size //= 2
        else:
            return size
        finally:
            update.optimizer.zero_grad(set_to_none=True)
    return 0
