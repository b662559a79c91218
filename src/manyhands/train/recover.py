"""Finds the checkpoint to resume from: of this run, of another run, or of the ImageNet example main.py."""

import contextlib
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from manyhands.checkpoint import files
from manyhands.checkpoint.folders import newest, resolve
from manyhands.checkpoint.read import Source, load, open_checkpoint
from manyhands.checkpoint.saved import saved_step
from manyhands.checkpoint.snapshot import Snapshot, flatten, unflatten
from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel.apply import compare_replicas
from manyhands.parallel.group.plain import broadcast_plain, broadcast_tensors


@dataclass(frozen=True)
class Resumable:
    """A state to resume from."""

    snapshot: Snapshot  # the state
    path: Path  # where it was
    notes: tuple[str, ...] = ()  # sentences for the user, such as why a newer checkpoint was passed over
    # the checkpoint opened for reading in pieces; then `snapshot` holds the plain state alone
    source: Source | None = None


def find_state(job: Job, folder: RunFolder, world: World, *, in_pieces: bool = False) -> Resumable | None:
    """Returns the state that the job resumes from, or None for a new run; the same on all processes.

    Rank 0 decides. A process on a machine with other files receives the state of rank 0. With `in_pieces`, each process
    reads its own shards later, if all processes see the checkpoint.

    Raises:
        UserError: the state is missing, damaged, or contains code.
    """
    found = None
    # Another machine may not have what rank 0 has; then it is given it below.
    with contextlib.nullcontext() if world.is_main else contextlib.suppress(UserError):
        found = _find(job, folder, in_pieces=in_pieces)
    identity = torch.tensor([_identity(found)], device=world.device)
    if compare_replicas({"checkpoint": identity}, world) is None:
        return found
    if found and found.source:  # its tensors are sent to processes that don't see the files
        found = replace(found, snapshot=found.source.snapshot(), source=None)
    return _share(found, world)


def _open(path: Path, passed_over: tuple[str, ...], *, in_pieces: bool) -> Resumable:
    if not in_pieces:
        return Resumable(load(path), path, passed_over)
    source = open_checkpoint(path, verified=True)  # `newest` and `resolve` have compared it just now
    return Resumable(Snapshot({}, None, dict(source.state)), path, passed_over, source)


def _share(found: Resumable | None, world: World) -> Resumable | None:
    """Rank 0's state on every process."""
    tensors: dict[str, Tensor] = {}
    tree = None
    if found and world.is_main:
        optimizer = found.snapshot.optimizer
        if optimizer:
            # Another tool's parameters are numbered, and JSON knows words as keys alone.
            optimizer = {**optimizer, "state": [[key, entries] for key, entries in optimizer["state"].items()]}
        snapshot = {"model": found.snapshot.model, "optimizer": optimizer, "state": found.snapshot.state}
        tree = {"snapshot": flatten(snapshot, "snapshot", tensors), "path": str(found.path)}
    tree = broadcast_plain(tree, world)
    if tree is None:
        return None
    content = unflatten(tree["snapshot"], broadcast_tensors(tensors, world))
    if content["optimizer"]:
        content["optimizer"]["state"] = dict(content["optimizer"]["state"])
    return found if world.is_main else Resumable(Snapshot(**content), Path(tree["path"]))


def _find(job: Job, folder: RunFolder, *, in_pieces: bool) -> Resumable | None:
    resume = job.checkpoint.resume
    if resume == "never":
        return None
    if resume == "auto":
        path, passed_over = newest(folder.checkpoints)
        if path is None and passed_over:
            hints = (*passed_over[:3], "start a new run in another folder: --out DIR")
            raise UserError("no checkpoint of this run can be read", str(folder.checkpoints), hints)
        saved = None if path else saved_step(folder)
        if saved is not None:
            hints = ("restore checkpoints/ from a copy or from rank 0's machine", "or start a new run: --out DIR")
            what = f"step {saved} was saved, but the run has no checkpoint now"
            raise UserError(what, str(folder.checkpoints), hints)
        return _open(path, tuple(passed_over), in_pieces=in_pieces) if path else None
    reference = Path(resume).expanduser()
    if not reference.exists():
        hints = ("choose auto, never, a run folder, a checkpoint folder or a weights file",)
        raise UserError(f"{resume} doesn't exist", "--resume", hints)
    path = resolve(reference, "last")
    if path.is_dir():
        passed_over = () if path == reference else tuple(newest(path.parent)[1])
        return _open(path, passed_over, in_pieces=in_pieces)
    from manyhands.checkpoint.foreign import read_foreign

    return Resumable(read_foreign(path), path)


def _identity(found: Resumable | None) -> int:
    """A number that is equal for equal states: of the manifest, which holds every file's hash, or of the file."""
    if found is None:
        return 0
    file = found.path / "manifest.json" if found.path.is_dir() else found.path
    with file.open("rb") as content:
        return int.from_bytes(hashlib.file_digest(content, "sha256").digest()[:7], "big")


def outputs_of(snapshot: Snapshot) -> int:
    """Returns the number of outputs in a foreign checkpoint, the length of its last tensor; 0 for manyhands' own."""
    if not snapshot.state.get("foreign") or not snapshot.model:
        return 0
    last = list(snapshot.model.values())[-1]
    return last.shape[0] if last.ndim else 0


def training_digest(job: Job, length: int) -> str:
    """Returns a digest of the settings that select samples; with equal digests, a run can resume within an epoch."""
    text = f"{length} {job.train.batch} {job.train.seed} {job.train.drop_last}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_position(
    snapshot: Snapshot, digest: str, steps_per_epoch: int, parameter_names: list[str], where: str
) -> None:
    """Moves a foreign checkpoint or a changed run to the start of an epoch, if possible.

    Raises:
        UserError: the checkpoint is from the middle of an epoch, and the batches have changed.
    """
    state = snapshot.state
    if state.get("foreign"):
        if snapshot.optimizer is not None:
            from manyhands.checkpoint.foreign import name_optimizer

            snapshot.optimizer = name_optimizer(snapshot.optimizer, parameter_names)
        epoch = int(state.get("epoch", 0))
        best = state.get("best", {})
        state.update(epoch=epoch, step=epoch * steps_per_epoch, step_in_epoch=0, evaluated_step=-1, best_step=-1)
        state["best_figure"] = best.get("top1")
        return
    if state.get("job") == digest:
        return
    if state.get("step_in_epoch", 0):
        what = "the checkpoint is from the middle of an epoch, but train.batch, train.seed or the data changed"
        hints = ("restore the batch, seed and data", "or resume from a checkpoint at the end of an epoch")
        raise UserError(what, where, hints)
    state["step"] = int(state.get("epoch", 0)) * steps_per_epoch


def refuse_later_checkpoints(folder: Path, step: int) -> None:
    """Refuses to resume at `step` before later checkpoints, which would be preferred to every new checkpoint.

    Raises UserError: there is a later checkpoint, because the run goes back or its batch was changed.
    """
    later = [path for path in files.step_folders(folder) if (files.step_of(path) or 0) > step]
    path = newest(folder)[0] if later else None
    if path in later:  # those that are torn are passed over by everybody
        what = f"the run would resume from step {step}, but its folder has a later checkpoint, {path.name}"
        hints = ("resume in another folder: --out NEW --resume CHECKPOINT", "or restore the earlier train.batch")
        raise UserError(what, str(folder), hints)
