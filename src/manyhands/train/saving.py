"""Saves checkpoints; saves and loads the synchronization state of each rank (with sync methods such as local SGD).

With checkpoint.pth_tar, also writes .pth.tar files after each epoch, for PyTorch's ImageNet example, main.py.
"""

import functools
import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from manyhands.checkpoint.describe import NetworkLayout
from manyhands.checkpoint.files import MODEL, OPTIMIZER, TornCheckpointError, read_manifest
from manyhands.checkpoint.folders import prune_checkpoints, remove_saved_step
from manyhands.checkpoint.read import load_checkpoint
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.trained import STATE_KEY
from manyhands.checkpoint.write import CheckpointGroup, CheckpointWriter, SaveError
from manyhands.checkpoint.write import save_unsharded as commit
from manyhands.config.job import Job, TrainOptions
from manyhands.core.errors import RunError, UserError
from manyhands.core.files import read_object, replaced_on_success, unused_path
from manyhands.core.machine import memory_bytes
from manyhands.core.phases import CLOCK, SAVING
from manyhands.core.records import write_json
from manyhands.core.run_folder import NOWHERE, resume_command
from manyhands.core.world import World
from manyhands.parallel.apply import checksums
from manyhands.parallel.group.plain import gather_plain
from manyhands.train.optimize import CustomScheduler, learning_rate, restore_optimizer
from manyhands.train.saver import SaveOutcome
from manyhands.train.state import Progress, capture, named_optimizer, split_state, training_digest
from manyhands.train.status import explain_nonfinite
from manyhands.train.trainer import Trainer


@CLOCK.in_phase(SAVING)
def save(trainer: Trainer) -> None:
    """Waits for the previous save, then starts writing a checkpoint, in the background if possible. A collective.

    `finish_save` reports errors.
    """
    finish_save(trainer)
    network, saver, step, started = trainer.network, trainer.saver, trainer.progress.step, time.perf_counter()
    with trainer.paused("save"):
        extra = _plain_state(trainer)
        trainer.synchronizer.average_buffers(step)
        save_rank_state(trainer)
        writes = trainer.world.is_main or bool(network.layouts) or trainer.world.rank in saver.writers
        write, background = None, not network.layouts
        if writes or network.share.collective_forward:
            with trainer.synchronizer.averaged():
                snapshot = capture(network, trainer.updater.optimizer, trainer.progress, extra, keep=writes)
            background = background and memory_bytes()[1] > sum(tensor.nbytes for tensor in snapshot.model.values())
            write = functools.partial(_write, trainer, snapshot, step, trainer.progress.best_step) if writes else None
        saver.saves += 1
        saver.waited_s = time.perf_counter() - started
        saver.start_save(step, write, background=background)
        trainer.status_round.saved_s = time.perf_counter()
    saver.stalled_s = time.perf_counter() - started
    if network.layouts:
        finish_save(trainer)


@CLOCK.in_phase(SAVING)
def finish_save(trainer: Trainer, *, written: float | None = None) -> None:
    """Waits for the save in progress, if any, and records its result. A collective.

    After a disk error, records a warning, and the run continues without this checkpoint. If `written`, the number of
    processes that have finished writing, is given and some haven't finished, returns without waiting.
    """
    saver, step, started = trainer.saver, trainer.saver.step, time.perf_counter()
    if step is None or written not in {None, len(saver.writers)}:
        return
    # If all processes have written, a wait here is a stall, so the phase stays.
    phase, trainer.heartbeats.phase = trainer.heartbeats.phase, "save" if written is None else trainer.heartbeats.phase
    written_here = saver.end_save()
    by_rank = gather_plain(written_here and asdict(written_here), trainer.world)
    trainer.heartbeats.phase = phase
    outcomes = {rank: SaveOutcome(**by_rank[rank]) for rank in saver.writers}
    if not all(outcome.finite for outcome in outcomes.values()):
        raise explain_nonfinite(trainer.network, trainer.world, trainer.updater.measured)
    if not outcomes[0].error:
        trainer.progress.saved_step = step
        if trainer.synchronizer.settings:  # also deletes the states of deleted checkpoints
            _prune_folder(trainer, _state_folder(trainer.folder.checkpoints, trainer.world), trainer.progress.best_step)
    for rank, outcome in outcomes.items():
        if outcome.error:
            which = f"checkpoint copy on rank {rank}'s machine" if rank else "checkpoint"
            trainer.journal.event("warning", f"the {which} was not saved at step {step}: {outcome.error}", step)
    digests = {rank: outcome.digests for rank, outcome in outcomes.items() if not outcome.error}
    for rank, mine in digests.items():
        other = [name for name, digest in digests.get(0, mine).items() if mine.get(name) != digest]
        if other:  # raises RunError with the rank and tensor if the networks differ
            trainer.verify_replicas()
            message = f"the checkpoint copies of ranks 0 and {rank} differ at step {step}: {', '.join(other)}"
            trainer.journal.event("warning", message, step)
    took_s = time.perf_counter() - started
    trainer.status_round.exclude_time(took_s)
    if interval := saver.interval:
        trainer.status_round.save_every_s = interval.record_save(saver.stalled_s + took_s, saver.wrote_s)
        interval.record_interval(trainer.status_round.save_every_s, trainer.journal, trainer.progress.step)


def rescue(trainer: Trainer) -> bool:
    """Saves a checkpoint on this process alone after another process failed. Returns True if it was saved.

    All processes have the same network. Each saves its last update, and the run resumes from the newest, so no update
    is lost. Returns False if the network is sharded or each process has its own synchronization state.
    """
    network, progress = trainer.network, trainer.progress
    incomplete = network.traits.sharded or network.layouts or trainer.synchronizer.settings
    # A torch scheduler is stepped at the beginning of an update.
    partial_update, scheduled = trainer.updater.partial_update, isinstance(trainer.updater.set_rates, CustomScheduler)
    between = partial_update.in_pieces or (partial_update.begun and scheduled)
    if incomplete or between or not progress.step or trainer.folder is NOWHERE:
        return False
    partial_update.undo()
    # The status round that sets `owed` may not have run.
    progress.owed |= trainer.due.evaluation() and progress.evaluated_step != progress.step
    folder = trainer.folder.checkpoints
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = capture(network, trainer.updater.optimizer, progress, _plain_state(trainer))
    with FileLock(trainer.folder.ranks / "rescue.lock", mode=0o600):  # a second process finds the checkpoint
        path = commit(folder, progress.step, snapshot)
    trainer.journal.event("saved", path.name, progress.step)
    return True


def _plain_state(trainer: Trainer) -> dict[str, Any]:
    """Returns those entries of a checkpoint that are not network, optimizer or progress."""
    extra: dict[str, Any] = {
        "saved_step": trainer.progress.step,
        "job": training_digest(trainer.job, trainer.feed.order.length),
        "classes": list(trainer.trained.classes),
        "model": trainer.job.model.name,
        STATE_KEY: trainer.trained.model_dump(mode="json"),
        **trainer.hooks.extra_state(),
        "sync": {**asdict(trainer.sync.cost), "processes": trainer.world.size},
        "most_in_a_pass": trainer.feed.sharing.largest_since_start,
    }
    if trainer.hooks.balance_shares:
        extra["shares"] = list(trainer.feed.sharing.shares) or [1] * trainer.feed.sharing.processes
    if trainer.updater.gradients.scaler:
        extra["scaler"] = trainer.updater.gradients.scaler.state_dict()
    if isinstance(trainer.updater.set_rates, CustomScheduler) and (state := trainer.updater.set_rates.state_text()):
        extra["schedule"] = state
    return extra


def save_last(trainer: Trainer) -> None:
    """Saves the final state of a run and waits. A collective. Raises RunError on all processes if the save fails."""
    save(trainer)
    finish_save(trainer)
    if trainer.progress.saved_step != trainer.progress.step:
        what = f"step {trainer.progress.step} could not be saved; for the error, see the last warning"
        hint = f"free disk space, then resume from the last checkpoint: {resume_command(trainer.folder.path)}"
        raise RunError(what, str(trainer.folder.checkpoints), (hint,))


def _write(trainer: Trainer, snapshot: Snapshot, step: int, best_step: int) -> SaveOutcome:
    """Writes the checkpoint. Retries once if the run folder was moved, unless the checkpoint is sharded."""
    trainer.saver.has_run |= trainer.folder.exists()
    moves = trainer.saver.has_run and not trainer.network.layouts
    try:
        outcome = _write_once(trainer, snapshot, step, best_step)
        if trainer.world.rank or not moves or trainer.folder.exists():
            return outcome
    except (SaveError, UserError, OSError) as error:
        missing = isinstance(error, TornCheckpointError) or isinstance(error.__cause__ or error, FileNotFoundError)
        if not missing or not moves:
            raise
    trainer.folder.wait_for_link()
    return _write_once(trainer, snapshot, step, best_step)


def _write_once(trainer: Trainer, snapshot: Snapshot, step: int, best_step: int) -> SaveOutcome:
    """Writes the checkpoint and deletes old ones, in a thread: reads no state that training changes meanwhile."""
    folder, network, world, started = trainer.folder.checkpoints, trainer.network, trainer.world, time.perf_counter()
    if network.layouts:
        gather = functools.partial(gather_plain, world=world)
        group = CheckpointGroup(world.rank, world.size, gather, world.device, trainer.saver.writers)
        layout = NetworkLayout(network.layouts.mesh, network.layouts)
        path = CheckpointWriter(folder, group, layout, pieces=trainer.job.checkpoint.pieces).write(step, snapshot)
    else:
        path = commit(folder, step, snapshot)
    if world.rank not in trainer.saver.writers:  # this process only sent its shards to a writer
        return SaveOutcome()
    _prune_folder(trainer, folder, best_step)
    waited_s, seconds = trainer.saver.waited_s, time.perf_counter() - started
    trainer.journal.event("saved", path.name, step, seconds=seconds, waited=waited_s)
    entries = read_manifest(path)["files"]
    # With some sync methods, each process has its own optimizer state.
    compared = (MODEL,) if trainer.synchronizer.settings else (MODEL, OPTIMIZER)
    return SaveOutcome(digests={name: entries[name]["sha256"] for name in compared if name in entries})


def _prune_folder(trainer: Trainer, folder: Path, best_step: int) -> None:
    best = folder / f"step-{best_step:08d}"
    prune_checkpoints(folder, trainer.job.checkpoint.keep, best if best.is_dir() else None)


def _state_folder(checkpoints: Path, world: World) -> Path:
    return checkpoints / f"rank-{world.rank:05d}-of-{world.size:05d}"


def save_rank_state(trainer: Trainer) -> None:
    """Saves the synchronization state of each process. Records an error as a warning. A collective."""
    mine = trainer.synchronizer.state()
    if mine is None:
        return
    tensors, numbers = mine
    step, folder = trainer.progress.step, _state_folder(trainer.folder.checkpoints, trainer.world)
    settings = trainer.synchronizer.settings
    state: dict[str, Any] = {"belongs_to": _fingerprint(trainer), "numbers": numbers, "own": settings}
    if trainer.updater.gradients.scaler:
        state["scaler"] = trainer.updater.gradients.scaler.state_dict()
    content = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    endless = frozenset({"buffers"} if trainer.network.traits.nonfinite_buffers else set[str]())
    optimizer = named_optimizer(trainer.network.model, trainer.updater.optimizer)
    failure = ""
    try:
        remove_saved_step(folder, step)  # of an earlier attempt, whose state may differ
        commit(folder, step, Snapshot(content, optimizer, state, endless))
    except SaveError as error:
        failure = error.message
    for rank, reason in enumerate(gather_plain(failure, trainer.world)):
        if reason:
            trainer.journal.event("warning", f"rank {rank} could not save its synchronization state: {reason}", step)


def load_rank_state(trainer: Trainer, checkpoint: Path) -> None:
    """Restores the synchronization state of all processes, or of none if a process lacks its file. A collective."""
    if not trainer.synchronizer.settings:
        return
    trainer.synchronizer.begin()
    found, reason = _find_rank_state(trainer, checkpoint)
    reasons, step = gather_plain(reason, trainer.world), trainer.progress.step
    missing = [rank for rank, reason in enumerate(reasons) if reason]
    if missing or not found:
        what = f"resuming without the synchronization state of rank {missing[0]}: {reasons[missing[0]]}"
        trainer.journal.event("warning", what, step)
        return
    trainer.synchronizer.load(found.model, {key: int(value) for key, value in found.state["numbers"].items()})
    if reset := restore_optimizer(found.optimizer or {"state": {}}, trainer.network.model, trainer.updater.optimizer):
        trainer.journal.event("warning", reset, step)
    if trainer.updater.gradients.scaler and "scaler" in found.state:
        trainer.updater.gradients.scaler.load_state_dict(found.state["scaler"])


def _find_rank_state(trainer: Trainer, checkpoint: Path) -> tuple[Snapshot | None, str]:
    """Reads this process's synchronization state at a checkpoint. Also returns the reason if it is unusable, or ""."""
    # The run's own folder, and the one that it resumes from, which may belong to another run.
    folders = (trainer.folder.checkpoints, checkpoint.parent)
    paths = [_state_folder(folder, trainer.world) / checkpoint.name for folder in folders]
    belongs_to, now = _fingerprint(trainer), trainer.synchronizer.settings
    path = next((one for one in paths if one.is_dir()), None)
    if path is None:
        return None, f"{paths[0]} doesn't exist"
    try:
        found = load_checkpoint(path)
    except (UserError, OSError) as error:
        return None, str(getattr(error, "message", error))
    if found.state.get("belongs_to") != belongs_to:
        return None, f"{path} belongs to another checkpoint"
    before = found.state.get("own", {})
    changed = [f"{key} changed from {before.get(key)} to {one}" for key, one in now.items() if before.get(key) != one]
    return found, f"{path} has other settings: {'; '.join(changed)}" if changed else ""


def _fingerprint(trainer: Trainer) -> list[Any]:
    """Returns the step and the checksums of the synchronized network, which together identify a checkpoint."""
    with trainer.synchronizer.averaged():
        sums = checksums(list(split_state(trainer.network.model)[0].values())).sum(0).tolist()
    return [trainer.progress.step, *sums]


CHECKPOINT, BEST = "checkpoint.pth.tar", "model_best.pth.tar"
WRITTEN = "pth_tar.json"  # in the run folder: size and time of the files that this run wrote


def write_pth_tar(trainer: Trainer, *, best: bool) -> None:
    """Writes checkpoint.pth.tar, and model_best.pth.tar if this epoch is the best. A collective."""
    progress, is_main = trainer.progress, trainer.world.is_main
    with trainer.paused("save"):
        trainer.synchronizer.average_buffers(progress.step)
        if trainer.network.traits.sharded or is_main:
            with trainer.synchronizer.averaged():
                snapshot = capture(trainer.network, trainer.updater.optimizer, progress, {}, keep=is_main)
            if is_main:
                snapshot = as_pth_tar(snapshot, trainer.job.train, progress, trainer.due.steps_per_epoch)
                _write_pth_tar(trainer, snapshot, best)


def as_pth_tar(snapshot: Snapshot, options: TrainOptions, progress: Progress, steps_per_epoch: int) -> Snapshot:
    """Converts a snapshot at an epoch's end to a checkpoint of PyTorch's ImageNet example, main.py."""
    assert snapshot.optimizer is not None
    rate = learning_rate(options, progress.step, steps_per_epoch)
    groups = [{**group, "lr": rate, "initial_lr": options.lr} for group in snapshot.optimizer["param_groups"]]
    for group in groups:  # kernels are chosen by each machine
        group.update({name: None for name in ("fused", "foreach") if name in group})
    scheduler = {
        "step_size": options.step_epochs,
        "gamma": options.step_factor if options.schedule == "step" else 1.0,
        "base_lrs": [options.lr],
        "last_epoch": progress.epoch,
        "_step_count": progress.epoch + 1,
        "_last_lr": [rate],
    }
    state = {"epoch": progress.epoch, "best": {"top1": max(0.0, progress.best_figure or 0.0)}, "scheduler": scheduler}
    return Snapshot(snapshot.model, {**snapshot.optimizer, "param_groups": groups}, {**snapshot.state, **state})


def check_same_training(job: Job, snapshot: Snapshot, where: str) -> None:
    """Raises UserError if PyTorch's ImageNet example, main.py, saved `snapshot` with other settings than the job's."""
    if not job.checkpoint.pth_tar or snapshot.state.get("foreign") != "imagenet-main":
        return
    options, group = job.train, (snapshot.optimizer or {}).get("param_groups", [{}])[0]
    scheduler = snapshot.state.get("scheduler", {})
    # The value in the file (None in old files) and in the job, by flag.
    settings = {
        "-a": (snapshot.state.get("arch"), job.model.name.removeprefix("torchvision:")),
        "--lr": (next(iter(scheduler.get("base_lrs", [])), group.get("initial_lr")), options.lr),
        "--momentum": (group.get("momentum"), options.momentum),
        "--weight-decay": (group.get("weight_decay"), options.weight_decay),
        "--train.nesterov": (group.get("nesterov"), options.nesterov),
        "--train.step-epochs": (scheduler.get("step_size"), options.step_epochs),
        "--train.step-factor": (scheduler.get("gamma"), options.step_factor),
    }
    wrong = {flag: both for flag, both in settings.items() if both[0] is not None and _settings_differ(*both)}
    if wrong:
        differing = ", ".join(f"{flag} {value}, not {asked}" for flag, (value, asked) in wrong.items())
        hints = "resume with " + " ".join(f"{flag} {str(value).lower()}" for flag, (value, _) in wrong.items())
        what = f"{Path(where).name} was trained with {differing}"
        raise UserError(what, where, (hints, "or use `manyhands train --resume`"))


def _settings_differ(one: Any, other: Any) -> bool:
    numbers = isinstance(one, float) and isinstance(other, int | float)
    return not math.isclose(one, other, rel_tol=1e-6) if numbers else bool(one != other)


def _write_pth_tar(trainer: Trainer, snapshot: Snapshot, best: bool) -> None:
    """Writes both .pth.tar files. Renames existing files that this run neither wrote nor resumed from."""
    from manyhands.checkpoint.foreign import write_foreign

    folder, arch = Path(trainer.job.checkpoint.pth_tar).expanduser(), trainer.job.model.name
    prefix = "module." if trainer.world.device.startswith("cuda") else ""
    record = trainer.folder.path / WRITTEN
    written = dict[str, Any](read_object(record) or {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / CHECKPOINT, folder / BEST)[: 1 + best]:
            resumed = Path(trainer.job.checkpoint.resume).expanduser().resolve() == path.resolve()
            if path.exists() and not resumed and written.get(str(path.resolve())) != _size_and_time(path):
                aside = unused_path(folder, path.name.removesuffix(".pth.tar"), ".pth.tar")
                path.rename(aside)
                trainer.journal.event("note", f"{path.name} existed before this run and was renamed to {aside.name}")
            if path.name == CHECKPOINT:
                write_foreign(path, snapshot, arch.removeprefix("torchvision:"), prefix)
            else:
                with replaced_on_success(path) as part:
                    shutil.copyfile(folder / CHECKPOINT, part)
            written[str(path.resolve())] = _size_and_time(path)
        write_json(record, written)
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        trainer.journal.event("warning", f"the .pth.tar files can't be written: {reason}", trainer.progress.step)


def _size_and_time(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
