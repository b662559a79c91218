"""What each process has of its own under some sync methods, saved beside the checkpoint of all.

Each process writes into its own machine's disk, `checkpoints/rank-00001-of-00003/step-…`, before rank 0 commits the
checkpoint; nothing large crosses the network. Without these files a run goes on from the agreed network.
"""

from pathlib import Path
from typing import Any

from manyhands.checkpoint.folders import prune, remove_step
from manyhands.checkpoint.read import load
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.write import SaveError, save
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.apply import checksums
from manyhands.parallel.plain import gather_plain
from manyhands.train.sharded_state import restore_optimizer
from manyhands.train.state import named_optimizer, split_state
from manyhands.train.trainer import Trainer


def rank_states_folder(checkpoints: Path, world: World) -> Path:
    """Where a process keeps what only it has."""
    return checkpoints / f"rank-{world.rank:05d}-of-{world.size:05d}"


def save_rank_state(trainer: Trainer) -> None:
    """Has every process save what only it has; a collective. Who can't is named, and the checkpoint is made without."""
    own = trainer.synchronizer.state()
    if own is None:
        return
    tensors, numbers = own
    step, folder = trainer.progress.step, rank_states_folder(trainer.folder.checkpoints, trainer.world)
    state: dict[str, Any] = {"belongs_to": _belongs_to(trainer), "numbers": numbers, "own": trainer.synchronizer.own}
    if trainer.update.gradients.scaler:
        state["scaler"] = trainer.update.gradients.scaler.state_dict()
    content = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    endless = frozenset({"buffers"} if trainer.network.endless else set[str]())
    optimizer = named_optimizer(trainer.network.inner, trainer.update.optimizer)
    said = ""
    try:
        remove_step(folder, step)  # of an earlier attempt, whose steps may have gone otherwise
        save(folder, step, Snapshot(content, optimizer, state, endless))
    except SaveError as error:
        said = error.message
    for rank, word in enumerate(gather_plain(said, trainer.world)):
        if word:
            trainer.journal.event("warning", f"rank {rank} could not save its rank state: {word}", step)


def prune_rank_states(trainer: Trainer) -> None:
    """Deletes what goes with checkpoints that are no longer kept; once a newer one has been committed."""
    if trainer.synchronizer.own:
        folder = rank_states_folder(trainer.folder.checkpoints, trainer.world)
        best = folder / f"step-{trainer.progress.best_step:08d}"
        prune(folder, trainer.job.checkpoint.keep, best if best.is_dir() else None)


def load_rank_state(trainer: Trainer, checkpoint: Path) -> None:
    """Gives every process back what it alone had at a checkpoint, where all find theirs; a collective.

    Args:
        trainer: whose network has been given the checkpoint's, and how far it had come.
        checkpoint: the folder, which may lie on another machine's disk.
    """
    if not trainer.synchronizer.own:
        return
    trainer.synchronizer.begin()
    found, said = _find(trainer, checkpoint)
    words = gather_plain(said, trainer.world)
    missing = [rank for rank, word in enumerate(words) if word]
    if missing or not found:
        what = f"resuming without the rank state of rank {missing[0]}: {words[missing[0]]}"
        trainer.journal.event("warning", what, trainer.progress.step)
        return
    trainer.synchronizer.load(found.model, {key: int(value) for key, value in found.state["numbers"].items()})
    anew = restore_optimizer(found.optimizer or {"state": {}}, trainer.network, trainer.update.optimizer)
    if anew:
        trainer.journal.event("warning", anew, trainer.progress.step)
    if trainer.update.gradients.scaler and "scaler" in found.state:
        trainer.update.gradients.scaler.load_state_dict(found.state["scaler"])


def _find(trainer: Trainer, checkpoint: Path) -> tuple[Snapshot | None, str]:
    """What this process alone had at a checkpoint, or why that can't be taken."""
    # The run's own folder, and the one that it goes on from, which may be another run's.
    folders = [rank_states_folder(folder, trainer.world) for folder in (trainer.folder.checkpoints, checkpoint.parent)]
    path = next((folder / checkpoint.name for folder in folders if (folder / checkpoint.name).is_dir()), None)
    belongs_to, own = _belongs_to(trainer), trainer.synchronizer.own
    if path is None:
        return None, f"{folders[0] / checkpoint.name} doesn't exist"
    try:
        found = load(path)
    except (UserError, OSError) as error:
        return None, str(getattr(error, "message", error))
    if found.state.get("belongs_to") != belongs_to:
        return None, f"{path} belongs to another checkpoint"
    before = found.state.get("own", {})
    changed = [
        f"{key} changed from {before.get(key)} to {value}" for key, value in own.items() if before.get(key) != value
    ]
    return found, f"{path} has other settings: {'; '.join(changed)}" if changed else ""


def _belongs_to(trainer: Trainer) -> list[Any]:
    """What tells a checkpoint from others of the same step: sums over the bits of the agreed network."""
    with trainer.synchronizer.averaged():
        sums = checksums(list(split_state(trainer.network.inner)[0].values())).sum(0).tolist()
    return [trainer.progress.step, *sums]
