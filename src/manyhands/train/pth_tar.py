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
    phase, trainer.phase = trainer.phase, "save"
    trainer.synchronizer.average_buffers(trainer.progress.step)
    if trainer.network.traits.sharded or trainer.world.is_main:
        with trainer.synchronizer.averaged():
            snapshot = capture(
                trainer.network, trainer.update.optimizer, trainer.progress, {}, keep=trainer.world.is_main
            )
        if trainer.world.is_main:
            _write(
                trainer,
                as_main(snapshot, trainer.job.train, trainer.progress, trainer.feed.order.steps_per_epoch),
                best,
            )
    trainer.status_round.reset(trainer.progress.step)
    trainer.phase = phase


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
    options = job.train
    asked = {
        "-a": job.model.name.removeprefix("torchvision:"),
        "--lr": options.lr,
        "--momentum": options.momentum,
        "--weight-decay": options.weight_decay,
        "--train.nesterov": options.nesterov,
        "--train.step-epochs": options.step_epochs,
        "--train.step-factor": options.step_factor,
    }
    found = _of_file(snapshot)
    wrong = {flag: found[flag] for flag, value in asked.items() if flag in found and _differ(found[flag], value)}
    if wrong:
        differing = ", ".join(f"{flag} {value}, not {asked[flag]}" for flag, value in wrong.items())
        hints = "resume with " + " ".join(f"{flag} {str(value).lower()}" for flag, value in wrong.items())
        raise UserError(
            f"{Path(where).name} was trained with {differing}", where, (hints, "or use `manyhands train --resume`")
        )


def _of_file(snapshot: Snapshot) -> dict[str, Any]:
    """What main.py's file says of its training, by the flag that says it here; an old file says less."""
    group = (snapshot.optimizer or {}).get("param_groups", [{}])[0]
    scheduler = snapshot.state.get("scheduler", {})
    said = {
        "-a": snapshot.state.get("arch"),
        "--lr": next(iter(scheduler.get("base_lrs", [])), group.get("initial_lr")),
        "--momentum": group.get("momentum"),
        "--weight-decay": group.get("weight_decay"),
        "--train.nesterov": group.get("nesterov"),
        "--train.step-epochs": scheduler.get("step_size"),
        "--train.step-factor": scheduler.get("gamma"),
    }
    return {flag: value for flag, value in said.items() if value is not None}


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return not math.isclose(one, other, rel_tol=1e-6)
    return bool(one != other)


def _write(trainer: Trainer, snapshot: Snapshot, best: bool) -> None:
    folder, job = Path(trainer.job.checkpoint.pth_tar).expanduser(), trainer.job
    try:
        folder.mkdir(parents=True, exist_ok=True)
        arch = job.model.name.removeprefix("torchvision:")
        _make_room(folder / CHECKPOINT, trainer)
        prefix = "module." if trainer.world.device.startswith("cuda") else ""
        written = [write_foreign(folder / CHECKPOINT, snapshot, arch, prefix)]
        if best:
            _make_room(folder / BEST, trainer)
            with replacing(folder / BEST) as part:
                shutil.copyfile(written[0], part)
            written.append(folder / BEST)
        _remember(trainer, written)
    except OSError as error:
        said = f"{error.filename or folder}: {error.strerror or error}"
        trainer.journal.event("warning", f"main.py's files can't be written: {said}", trainer.progress.step)


def _make_room(path: Path, trainer: Trainer) -> None:
    """Keeps a file that this run neither wrote nor went on from under another name, and says so."""
    if not path.exists() or path.resolve() == Path(trainer.job.checkpoint.resume).expanduser().resolve():
        return
    if _recall(trainer).get(str(path.resolve())) == _identity(path):
        return
    aside = free_name(path.parent, path.name.removesuffix(".pth.tar"), ".pth.tar")
    path.rename(aside)
    trainer.journal.event("note", f"{path.name} existed before this run and was renamed to {aside.name}")


def _remember(trainer: Trainer, written: list[Path]) -> None:
    known = {str(path.resolve()): _identity(path) for path in written}
    write_json(trainer.folder.path / WRITTEN, {**_recall(trainer), **known})


def _recall(trainer: Trainer) -> dict[str, Any]:
    return read_object(trainer.folder.path / WRITTEN) or {}


def _identity(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
