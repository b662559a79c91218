"""Finds where a run goes on: its own newest checkpoint, another's, or imagenet main.py's file."""

import contextlib
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from manyhands.checkpoint import files
from manyhands.checkpoint.folders import newest, resolve
from manyhands.checkpoint.foreign import name_optimizer, read_foreign
from manyhands.checkpoint.read import Source, load, open_checkpoint
from manyhands.checkpoint.saved import saved_step
from manyhands.checkpoint.snapshot import Snapshot, flatten, unflatten
from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel.apply import compare_replicas
from manyhands.parallel.plain import broadcast_plain, broadcast_tensors


@dataclass(frozen=True)
class Resumable:
    """A state to go on from."""

    snapshot: Snapshot  # the state
    path: Path  # where it was
    notes: tuple[str, ...] = ()  # sentences for the user, such as why a newer checkpoint was passed over
    # the checkpoint opened for reading in pieces; then `snapshot` holds the plain state alone
    source: Source | None = None


def find_state(job: Job, folder: RunFolder, world: World, *, in_pieces: bool = False) -> Resumable | None:
    """The state that the job says to go on from, or None for a fresh start; equal on all processes.

    Rank 0 decides. A process that doesn't see the same files (another machine) is given rank 0's state.

    Args:
        job: says where to look.
        folder: of the run.
        world: who takes part.
        in_pieces: each process is to read its own pieces later, where all see the checkpoint.

    Raises:
        UserError: the named state is missing, torn, or holds code.
    """
    found = None
    # Another machine may not have what rank 0 has; then it is given it below.
    with contextlib.nullcontext() if world.is_main else contextlib.suppress(UserError):
        found = _find(job, folder, in_pieces=in_pieces)
    identity = torch.tensor([_identity(found)], device=world.device)
    if compare_replicas({"checkpoint": identity}, world) is None:
        return found
    return _share(_whole(found), world)


def _whole(found: Resumable | None) -> Resumable | None:
    """What was found with its tensors in memory, to be sent to processes that don't see the files."""
    return replace(found, snapshot=found.source.snapshot(), source=None) if found and found.source else found


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
            raise UserError(
                f"step {saved} was saved, but the run has no checkpoint now", str(folder.checkpoints), hints
            )
        return _open(path, tuple(passed_over), in_pieces=in_pieces) if path else None
    reference = Path(resume).expanduser()
    if not reference.exists():
        raise UserError(
            f"{resume} doesn't exist",
            "--resume",
            ("choose auto, never, a run folder, a checkpoint folder or a weights file",),
        )
    path = resolve(reference, "last")
    if path.is_dir():
        passed_over = () if path == reference else tuple(newest(path.parent)[1])
        return _open(path, passed_over, in_pieces=in_pieces)
    return Resumable(read_foreign(path), path)


def _identity(found: Resumable | None) -> int:
    """A number that is equal for equal states: of the manifest, which holds every file's hash, or of the file."""
    if found is None:
        return 0
    file = found.path / "manifest.json" if found.path.is_dir() else found.path
    with file.open("rb") as content:
        return int.from_bytes(hashlib.file_digest(content, "sha256").digest()[:7], "big")


def outputs_of(snapshot: Snapshot) -> int:
    """Outputs of the network that a foreign checkpoint holds: the length of its last tensor; 0 for our own."""
    if not snapshot.state.get("foreign") or not snapshot.model:
        return 0
    last = list(snapshot.model.values())[-1]
    return last.shape[0] if last.ndim else 0


def training_digest(job: Job, length: int) -> str:
    """Of everything that decides which samples a step sees; two jobs of equal digest can go on mid-epoch."""
    text = f"{length} {job.train.batch} {job.train.seed} {job.train.drop_last}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_position(
    snapshot: Snapshot, digest: str, steps_per_epoch: int, parameter_names: list[str], where: str
) -> None:
    """Places a foreign or changed run at the start of an epoch, or refuses what can't be placed.

    Raises:
        UserError: the checkpoint lies within an epoch of other batches than this job's.
    """
    state = snapshot.state
    if state.get("foreign"):
        if snapshot.optimizer is not None:
            snapshot.optimizer = name_optimizer(snapshot.optimizer, parameter_names)
        epoch = int(state.get("epoch", 0))
        best = state.get("best", {})
        state.update(epoch=epoch, step=epoch * steps_per_epoch, step_in_epoch=0, evaluated_step=-1, best_step=-1)
        state["best_figure"] = best.get("top1")
        return
    if state.get("job") == digest:
        return
    if state.get("step_in_epoch", 0):
        raise UserError(
            "the checkpoint is from the middle of an epoch, but train.batch, train.seed or the data changed",
            where,
            ("restore the batch, seed and data", "or resume from a checkpoint at the end of an epoch"),
        )
    state["step"] = int(state.get("epoch", 0)) * steps_per_epoch


def refuse_later_checkpoints(folder: Path, step: int) -> None:
    """Refuses to go on below checkpoints of later steps: those would win over every new one, which is then lost.

    Args:
        folder: where this run's checkpoints are kept.
        step: where the run is about to go on, counted in this job's updates.

    Raises:
        UserError: a later checkpoint is there, since the run is turned back or its batch was changed.
    """
    later = [path for path in files.step_folders(folder) if (files.step_of(path) or 0) > step]
    path = newest(folder)[0] if later else None
    if path in later:  # those that are torn are passed over by everybody
        raise UserError(
            f"the run would resume from step {step}, but its folder has a later checkpoint, {path.name}",
            str(folder),
            ("resume in another folder: --out NEW --resume CHECKPOINT", "or restore the earlier train.batch"),
        )
