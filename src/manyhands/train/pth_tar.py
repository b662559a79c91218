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
# In the run folder: size and time of what this run wrote, to tell it from what others did.
WRITTEN = "pth_tar.json"


def write_pth_tar(trainer: Trainer, *, best: bool) -> None:
    """Writes checkpoint.pth.tar, and model_best.pth.tar if this epoch is the best.

    A collective if the network is sharded. On a full disk, the files are not written and the run continues.
    """
    phase, trainer.heartbeats.phase = trainer.heartbeats.phase, "save"
    trainer.synchronizer.average_buffers(trainer.progress.step)
    if trainer.network.traits.sharded or trainer.world.is_main:
        with trainer.synchronizer.averaged():
            keep, optimizer = trainer.world.is_main, trainer.update.optimizer
            snapshot = capture(trainer.network, optimizer, trainer.progress, {}, keep=keep)
        if trainer.world.is_main:
            steps_per_epoch = trainer.feed.order.steps_per_epoch
            _write(trainer, as_main(snapshot, trainer.job.train, trainer.progress, steps_per_epoch), best)
    trainer.status_round.reset(trainer.progress.step)
    trainer.heartbeats.phase = phase


def as_main(snapshot: Snapshot, options: TrainOptions, progress: Progress, steps_per_epoch: int) -> Snapshot:
    """Converts a snapshot to main.py's state after the scheduler's step, with the learning rate of the next epoch."""
    assert snapshot.optimizer is not None
    rate = learning_rate(options, progress.step, steps_per_epoch)
    # The choice of kernels is this machine's, not the training's.
    groups = [{**group, "lr": rate, "initial_lr": options.lr} for group in snapshot.optimizer["param_groups"]]
    for group in groups:
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
    """Refuses to resume a main.py file with another network or other rates than it was trained with.

    main.py reads these from the file and ignores its flags; here the job defines them.

    Raises:
        UserError: the file and the job differ.
    """
    if not job.checkpoint.pth_tar or snapshot.state.get("foreign") != "imagenet-main":
        return
    options, group = job.train, (snapshot.optimizer or {}).get("param_groups", [{}])[0]
    scheduler = snapshot.state.get("scheduler", {})
    # By the flag that sets it here: what the file has, where it isn't too old, and the job's.
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
        raise UserError(
            f"{Path(where).name} was trained with {differing}", where, (hints, "or use `manyhands train --resume`")
        )


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return not math.isclose(one, other, rel_tol=1e-6)
    return bool(one != other)


def _write(trainer: Trainer, snapshot: Snapshot, best: bool) -> None:
    folder, arch = Path(trainer.job.checkpoint.pth_tar).expanduser(), trainer.job.model.name
    prefix = "module." if trainer.world.device.startswith("cuda") else ""
    record = trainer.folder.path / WRITTEN
    written = dict[str, Any](read_object(record) or {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / CHECKPOINT, folder / BEST)[: 1 + best]:
            _make_room(path, trainer, written)
            if path.name == CHECKPOINT:
                write_foreign(path, snapshot, arch.removeprefix("torchvision:"), prefix)
            else:
                with replacing(path) as part:
                    shutil.copyfile(folder / CHECKPOINT, part)
            written[str(path.resolve())] = _identity(path)
        write_json(record, written)
    except OSError as error:
        said = f"{error.filename or folder}: {error.strerror or error}"
        trainer.journal.event("warning", f"the .pth.tar files can't be written: {said}", trainer.progress.step)


def _make_room(path: Path, trainer: Trainer, written: dict[str, Any]) -> None:
    """Renames a file that this run neither wrote nor resumed from, with a note."""
    if not path.exists() or path.resolve() == Path(trainer.job.checkpoint.resume).expanduser().resolve():
        return
    if written.get(str(path.resolve())) != _identity(path):
        aside = free_name(path.parent, path.name.removesuffix(".pth.tar"), ".pth.tar")
        path.rename(aside)
        trainer.journal.event("note", f"{path.name} existed before this run and was renamed to {aside.name}")


def _identity(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
