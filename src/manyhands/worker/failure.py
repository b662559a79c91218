"""Creates and writes failure records, and suggests smaller batches after out-of-memory errors."""

import os
import socket
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyhands.core.devices import is_out_of_memory
from manyhands.core.errors import EXIT_INTERRUPTED, EXIT_USAGE, ManyhandsError, RunError
from manyhands.core.records import FAILURE_FILE, Failure, write_json
from manyhands.core.run_folder import RunFolder
from manyhands.core.user_code import user_traceback
from manyhands.parallel.gradients import AUTOCAST
from manyhands.parallel.group.rendezvous import PeerFailure, is_peer_loss

if TYPE_CHECKING:
    from manyhands.train.trainer import Trainer


def describe_failure(error: BaseException, *, rank: int, step: int | None, phase: str) -> Failure:
    """Returns the failure record of an exception on this process. `phase`: the activity, such as "evaluate"."""
    if isinstance(error, KeyboardInterrupt):
        error = ManyhandsError("stopped without a save")
        error.exit_code = EXIT_INTERRUPTED
    known = error if isinstance(error, ManyhandsError) else None
    text = "".join(traceback.format_exception(error))
    cause = known.__cause__ if known else error
    excerpt = user_traceback(cause) if cause else "\n".join(getattr(error, "__notes__", ()))
    own: dict[str, Any] = {"what": f"{type(error).__name__}: {error}".strip()}
    if known:
        own = {"what": known.message, "where": known.where, "hints": list(known.hints), "exit_code": known.exit_code}
    return _make_record(
        rank,
        step,
        phase,
        error=type(error).__name__,
        traceback="" if known and known.__cause__ is None else text,
        excerpt=excerpt or ("" if known else text),
        consequence=is_peer_loss(error),
        **own,
    )


def _make_record(rank: int, step: int | None, phase: str, **fields: Any) -> Failure:
    here = {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    return Failure(rank=rank, step=step, phase=phase, **here, **fields)


def explain_out_of_memory(error: BaseException, trainer: "Trainer | None") -> RunError:
    """Returns an error with hints for an out-of-memory error. Runs smaller batches, to suggest one that fits."""
    first_line = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    if trainer is None:
        hints = ["choose a smaller network or a smaller data.image_size"]
        hints.append("or shard the network over several processes: --parallel fsdp")
        return RunError(f"out of memory before the first update: {first_line}", socket.gethostname(), tuple(hints))
    # The passes below must not exchange gradients.
    trainer.synchronizer.close()
    # The error's frames keep the tensors of the failed pass in memory.
    traceback.clear_frames(error.__traceback__)
    options, evaluating = trainer.job.train, trainer.heartbeats.phase == "evaluate"
    if evaluating:
        taken = options.evaluate_batch
        fits = _largest_that_fits(trainer, taken, evaluating=True)
        hints = [f"reduce the batch: --set train.evaluate_batch={fits}"] if fits else []
    else:
        share = max(trainer.feed.samples_by_rank())
        taken = min(options.micro_batch or share, share)
        fits = _largest_that_fits(trainer, taken, evaluating=False)
        hints = [f"add --set train.micro_batch={fits}; the global batch stays {options.batch}"] if fits else []
        if fits and trainer.network.norms.layers and isinstance(options.norm_group, int) and fits < options.norm_group:
            hints.append(f"also add --set train.norm_group={max(2, fits)}: a BatchNorm group must fit a micro-batch")
    kind = "an evaluation batch" if evaluating else "a micro-batch"
    halved = "" if options.precision in AUTOCAST else ", or add --set train.precision=bf16"
    return RunError(
        f"out of memory with {taken} pictures in {kind}: {first_line}",
        f"rank {trainer.world.rank} on {socket.gethostname()}, {trainer.world.device}",
        (*hints, f"{'or ' * bool(hints)}reduce data.image_size{halved}"),
    )


def _largest_that_fits(trainer: "Trainer", taken: int, *, evaluating: bool) -> int:
    """Halves the number of samples until a pass fits into memory. Returns 0 if that isn't possible on this process."""
    from manyhands.train.trial_step import StepProbe

    model, size = trainer.network.model, taken // 2 if not trainer.network.share.collective_forward else 0
    while size >= 1:
        trainer.updater.optimizer.zero_grad(set_to_none=True)
        try:
            samples = torch.arange(size) % trainer.feed.order.length
            batch = next(iter(trainer.feed.loader.batches(0, [samples])))
            if evaluating:
                model.eval()
                with torch.inference_mode(), trainer.updater.gradients.autocast():
                    model(batch.images)
            else:  # the size that fits depends on the precision
                StepProbe(model, trainer.updater.loss_fn, trainer.job.train, trainer.world).run(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                return 0
            traceback.clear_frames(error.__traceback__)
            size //= 2
        else:
            return size
        finally:
            trainer.updater.optimizer.zero_grad(set_to_none=True)
    return 0


def save_record(record: Failure, folder: RunFolder) -> Failure:
    """Writes the record for agent and launcher, and the full traceback into the log. Returns it with a hint.

    Call this before any operation that may wait for other processes. Creates no folders, because the run folder may not
    be known yet, or may have been removed.
    """
    log = folder.ranks / f"{record.rank}.log"
    if record.traceback and folder.failures.is_dir():
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(record.traceback)
            if record.exit_code != EXIT_USAGE and not record.hints:
                record = record.model_copy(update={"hints": [f"see the full traceback in {log}"]})
    write_record(record, folder)
    return record


def write_record(record: Failure, folder: RunFolder) -> None:
    """Writes the record for the agent, and into the run folder. Ignores write errors, such as a full disk."""
    places = [Path(os.environ[FAILURE_FILE])] if FAILURE_FILE in os.environ else []
    places += [folder.failures / f"{record.rank}.json"] if folder.failures.is_dir() else []
    for place in places:
        with suppress(OSError):
            write_json(place, record)


def publish_or_adopt_first_cause(group: Any, record: Failure) -> Failure:
    """Publishes an original failure as the first cause. A consequence isn't published: it gets the first cause."""
    if not record.consequence:
        group.cause.publish(PeerFailure.create(record.rank, record.host, record.what))
        return record
    failure = group.cause.wait_for_failure()
    if not failure:
        what = f"another process ended or is unreachable: {record.what}"
        hints = ["see the last messages of the other processes", *record.hints]
        return record.model_copy(update={"what": what, "hints": hints, "excerpt": ""})
    return record.model_copy(update=first_failure_fields(failure))


def first_failure_fields(failure: Any) -> dict[str, Any]:
    """Returns a record's "what", "hints" and "excerpt" that report another process's failure as the cause."""
    what = f"rank {failure.rank} on {failure.host} failed first: {failure.what}"
    return {"what": what, "hints": [f"see the terminal or log of rank {failure.rank}"], "excerpt": ""}


def describe_peer_failure(failure: Any, *, rank: int, step: int | None, phase: str) -> Failure:
    """Returns this process's record after another process failed. `failure`: the other's failure; None: unknown."""
    what, hints = "rank 0's store is unreachable, so the run can't continue", ["see the last messages of rank 0"]
    known = first_failure_fields(failure) if failure else {"what": what, "hints": hints}
    return _make_record(rank, step, phase, error="PeerGone", consequence=True, **known)
