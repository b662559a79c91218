"""Converts the exception that ended a process into a failure record and a message."""

import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from manyhands.core.errors import EXIT_INTERRUPTED, ManyhandsError, RunError
from manyhands.core.records import Failure
from manyhands.core.user_code import users_traceback
from manyhands.core.world import World
from manyhands.parallel.gradients import AUTOCAST, Gradients
from manyhands.parallel.network import ParallelNetwork, full_batch

if TYPE_CHECKING:
    from manyhands.data.transforms import Batch
    from manyhands.train.trainer import Trainer

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
    # NCCL's words for it, and those of torch's watch over NCCL.
    "Connection closed by remote peer",
    "remote process exiting",
    "communicator was aborted",
    "collective operation timeout",
    "operations have failed or timed out",
    "wait timeout after",
    "Socket Timeout",
)
# A store that can't be reached is a peer that has gone, but for a port that somebody else holds.
OWN_MISTAKES = ("EADDRINUSE", "Address already in use", "address already in use")


def describe_failure(error: BaseException, *, rank: int, step: int | None, phase: str) -> Failure:
    """Returns the record of a failure on this process."""
    if isinstance(error, KeyboardInterrupt):
        error = ManyhandsError("stopped without a save")
        error.exit_code = EXIT_INTERRUPTED
    known = error if isinstance(error, ManyhandsError) else None
    text = "".join(traceback.format_exception(error))
    cause = known.__cause__ if known else error
    excerpt = users_traceback(cause) if cause else "\n".join(getattr(error, "__notes__", ()))
    what = known.message if known else f"{type(error).__name__}: {error}".strip()
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
        hints=list(known.hints) if known else [],
        traceback="" if known and known.__cause__ is None else text,
        excerpt=excerpt or ("" if known else text),
        consequence=is_consequence(error),
    )


def is_consequence(error: BaseException) -> bool:
    """True if the error only reports the loss of a peer."""
    if isinstance(error, ManyhandsError):
        return False
    said = str(error)
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return not any(text in said for text in OWN_MISTAKES)
    # A backend's error may as well be the cause: NCCL's "Duplicate GPU detected" comes as one on every rank.
    return isinstance(error, RuntimeError) and any(text in said for text in CONSEQUENCES)


def is_out_of_memory(error: BaseException) -> bool:
    """True if a device or the machine was out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def explain_memory(error: BaseException, trainer: "Trainer") -> RunError:
    """Returns the error for out of memory; tries smaller micro-batches on this process to find one that fits."""
    # What is tried here is nobody else's business.
    trainer.synchronizer.close()
    # The error's frames hold the tensors of the pass that failed.
    traceback.clear_frames(error.__traceback__)
    options, evaluating = trainer.job.train, trainer.phase == "evaluate"
    if evaluating:
        taken = options.evaluate_batch
        fits = _largest_that_fits(trainer, taken, _try_evaluation)
        hints = [f"reduce the batch: --set train.evaluate_batch={fits}"] if fits else []
    else:
        share = max(trainer.feed.samples_of_each())
        taken = min(options.micro_batch or share, share)
        fits = _largest_that_fits(trainer, taken, _try_update)
        hints = [f"add --set train.micro_batch={fits}; the global batch stays {options.batch}"] if fits else []
        if fits and trainer.network.norms.layers and isinstance(options.norm_group, int) and fits < options.norm_group:
            hints.append(f"also add --set train.norm_group={max(2, fits)}: a BatchNorm group must fit a micro-batch")
    kind = "an evaluation batch" if evaluating else "a micro-batch"
    halved = "" if options.precision in AUTOCAST else ", or add --set train.precision=bf16"
    return RunError(
        f"out of memory with {taken} pictures in {kind}: {_first_line(error)}",
        f"rank {trainer.world.rank} on {socket.gethostname()}, {trainer.world.device}",
        (*hints, f"{'or ' * bool(hints)}reduce data.image_size{halved}"),
    )


def explain_early_memory(error: BaseException) -> RunError:
    """Returns the error for out of memory before the first update."""
    hints = (
        "choose a smaller network or a smaller data.image_size",
        "or shard the network over several processes: --parallel fsdp",
    )
    return RunError(f"out of memory before the first update: {_first_line(error)}", socket.gethostname(), hints)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _largest_that_fits(trainer: "Trainer", taken: int, attempt: "Callable[[Trainer, Batch], None]") -> int:
    """Halves the pass until it fits; 0 when not even one picture does, or when other processes would have to help."""
    if trainer.network.share.collective_forward:
        return 0
    size = taken // 2
    while size >= 1:
        trainer.update.optimizer.zero_grad(set_to_none=True)
        try:
            samples = torch.arange(size) % trainer.feed.order.length
            attempt(trainer, next(iter(trainer.feed.loader.batches(0, [samples]))))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                return 0
            traceback.clear_frames(error.__traceback__)
            size //= 2
        else:
            return size
        finally:
            trainer.update.optimizer.zero_grad(set_to_none=True)
    return 0


def _try_update(trainer: "Trainer", batch: "Batch") -> None:
    alone = ParallelNetwork(trainer.network.model)
    precision = trainer.job.train.precision  # in another one other sizes fit
    gradients = Gradients(alone, World(device=trainer.world.device), trainer.update.loss_fn, precision=precision)
    gradients.forward_backward(full_batch(batch.images, batch.labels), len(batch.labels))


def _try_evaluation(trainer: "Trainer", batch: "Batch") -> None:
    trainer.network.model.eval()
    with torch.inference_mode(), trainer.update.gradients.autocast():
        trainer.network.model(batch.images)
