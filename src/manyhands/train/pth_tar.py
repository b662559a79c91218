"""Checkpoints in the format of the ImageNet example main.py, written after each epoch, for its --resume."""

import math
import shutil
from pathlib import Path
from typing import Any

from manyhands.checkpoint.foreign import write_foreign
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.config.job import Job, TrainOptions
from manyhands.core.errors import UserError
from manyhands.core.files import free_name, read_object, replacing
from manyhands.core.records import write_json
from manyhands.train.optimize import learning_rate
from manyhands.train.state import Progress, capture
from manyhands.train.trainer import Trainer

CHECKPOINT, BEST = "checkpoint.pth.tar", "model_best.pth.tar"
WRITTEN = "pth_tar.json"  # in the run folder: size and time of the files that this run wrote


def write_pth_tar(trainer: Trainer, *, best: bool) -> None:
    """Writes checkpoint.pth.tar, and model_best.pth.tar if this epoch is the best; a collective."""
    progress, is_main = trainer.progress, trainer.world.is_main
    with trainer.paused("save"):
        trainer.synchronizer.average_buffers(progress.step)
        if trainer.network.traits.sharded or is_main:
            with trainer.synchronizer.averaged():
                snapshot = capture(trainer.network, trainer.updater.optimizer, progress, {}, keep=is_main)
            if is_main:
                _write(trainer, as_main(snapshot, trainer.job.train, progress, trainer.due.steps_per_epoch), best)


def as_main(snapshot: Snapshot, options: TrainOptions, progress: Progress, steps_per_epoch: int) -> Snapshot:
    """Converts a snapshot to main.py's state after the scheduler's step, with the learning rate of the next epoch."""
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
    """Raises UserError if main.py trained the file with another network or other settings than the job's."""
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
    wrong = {flag: both for flag, both in settings.items() if both[0] is not None and _differ(*both)}
    if wrong:
        differing = ", ".join(f"{flag} {value}, not {asked}" for flag, (value, asked) in wrong.items())
        hints = "resume with " + " ".join(f"{flag} {str(value).lower()}" for flag, (value, _) in wrong.items())
        what = f"{Path(where).name} was trained with {differing}"
        raise UserError(what, where, (hints, "or use `manyhands train --resume`"))


def _differ(one: Any, other: Any) -> bool:
    numbers = isinstance(one, float) and isinstance(other, int | float)
    return not math.isclose(one, other, rel_tol=1e-6) if numbers else bool(one != other)


def _write(trainer: Trainer, snapshot: Snapshot, best: bool) -> None:
    """Writes the files; renames existing files that this run neither wrote nor resumed from."""
    folder, arch = Path(trainer.job.checkpoint.pth_tar).expanduser(), trainer.job.model.name
    prefix = "module." if trainer.world.device.startswith("cuda") else ""
    record = trainer.folder.path / WRITTEN
    written = dict[str, Any](read_object(record) or {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / CHECKPOINT, folder / BEST)[: 1 + best]:
            resumed = Path(trainer.job.checkpoint.resume).expanduser().resolve() == path.resolve()
            if path.exists() and not resumed and written.get(str(path.resolve())) != _identity(path):
                aside = free_name(folder, path.name.removesuffix(".pth.tar"), ".pth.tar")
                path.rename(aside)
                trainer.journal.event("note", f"{path.name} existed before this run and was renamed to {aside.name}")
            if path.name == CHECKPOINT:
                write_foreign(path, snapshot, arch.removeprefix("torchvision:"), prefix)
            else:
                with replacing(path) as part:
                    shutil.copyfile(folder / CHECKPOINT, part)
            written[str(path.resolve())] = _identity(path)
        write_json(record, written)
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        trainer.journal.event("warning", f"the .pth.tar files can't be written: {reason}", trainer.progress.step)


def _identity(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
