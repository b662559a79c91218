"""What each process has of its own under some sync methods, saved beside the checkpoint of all.

Each process writes into its own machine's disk, `checkpoints/rank-00001-of-00003/step-…`, before rank 0 commits the
checkpoint; nothing large crosses the network. Without these files a run goes on from the agreed network.
"""

from pathlib import Path
from typing import Any

from manyhands.checkpoint.load import load
from manyhands.checkpoint.save import SaveError, prune, remove_step, save
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.apply import checksums
from manyhands.parallel.plain import gather_plain
from manyhands.train.cut_state import restore_optimizer
from manyhands.train.parts import Parts
from manyhands.train.state import named_optimizer


def own_folder(checkpoints: Path, world: World) -> Path:
    """Where a process keeps what only it has."""
    return checkpoints / f"rank-{world.rank:05d}-of-{world.size:05d}"


def save_own(parts: Parts) -> None:
    """Has every process save what only it has; a collective. Who can't is named, and the checkpoint is made without."""
    own = parts.agreeing.state()
    if own is None:
        return
    tensors, numbers = own
    step, folder = parts.progress.step, own_folder(parts.folder.checkpoints, parts.world)
    state: dict[str, Any] = {"belongs_to": _belongs_to(parts), "numbers": numbers, "own": parts.agreeing.own}
    if parts.update.scaler:
        state["scaler"] = parts.update.scaler.state_dict()
    content = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    endless = frozenset({"buffers"} if parts.network.endless else set[str]())
    optimizer = named_optimizer(parts.network.inner, parts.update.optimizer)
    said = ""
    try:
        remove_step(folder, step)  # of an earlier attempt, whose steps may have gone otherwise
        save(folder, step, Snapshot(content, optimizer, state, endless))
    except SaveError as error:
        said = error.what
    for rank, word in enumerate(gather_plain(said, parts.world)):
        if word:
            parts.journal.event("warning", f"rank {rank} could not save its own state: {word}", step)


def prune_own(parts: Parts) -> None:
    """Deletes what goes with checkpoints that are no longer kept; once a newer one has been committed."""
    if parts.agreeing.own:
        folder = own_folder(parts.folder.checkpoints, parts.world)
        best = folder / f"step-{parts.progress.best_step:08d}"
        prune(folder, parts.job.checkpoint.keep, best if best.is_dir() else None)


def load_own(parts: Parts, checkpoint: Path) -> None:
    """Gives every process back what it alone had at a checkpoint, where all find theirs; a collective.

    Args:
        parts: whose network has been given the checkpoint's, and how far it had come.
        checkpoint: the folder, which may lie on another machine's disk.
    """
    if not parts.agreeing.own:
        return
    parts.agreeing.begin()
    found, said = _find(parts, checkpoint)
    words = gather_plain(said, parts.world)
    missing = [rank for rank, word in enumerate(words) if word]
    if missing or not found:
        what = f"goes on from the agreed network; rank {missing[0]} has not what it alone had: {words[missing[0]]}"
        parts.journal.event("warning", what, parts.progress.step)
        return
    parts.agreeing.load(found.model, {key: int(value) for key, value in found.state["numbers"].items()})
    anew = restore_optimizer(found.optimizer or {"state": {}}, parts.network, parts.update.optimizer)
    if anew:
        parts.journal.event("warning", anew, parts.progress.step)
    if parts.update.scaler and "scaler" in found.state:
        parts.update.scaler.load_state_dict(found.state["scaler"])


def _find(parts: Parts, checkpoint: Path) -> tuple[Snapshot | None, str]:
    """What this process alone had at a checkpoint, or why that can't be taken."""
    # The run's own folder, and the one that it goes on from, which may be another run's.
    folders = [own_folder(folder, parts.world) for folder in (parts.folder.checkpoints, checkpoint.parent)]
    path = next((folder / checkpoint.name for folder in folders if (folder / checkpoint.name).is_dir()), None)
    belongs_to, own = _belongs_to(parts), parts.agreeing.own
    if path is None:
        return None, f"there is no {folders[0] / checkpoint.name}"
    try:
        found = load(path)
    except (UserError, OSError) as error:
        return None, str(getattr(error, "what", error))
    if found.state.get("belongs_to") != belongs_to:
        return None, f"{path} belongs to another checkpoint"
    before = found.state.get("own", {})
    changed = [
        f"{key} was {before.get(key)}, and is {value} now" for key, value in own.items() if before.get(key) != value
    ]
    return found, f"{path} was made otherwise: {'; '.join(changed)}" if changed else ""


def _belongs_to(parts: Parts) -> list[Any]:
    """What tells a checkpoint from others of the same step: sums over the bits of the agreed network."""
    with parts.agreeing.agreed():
        sums = checksums(list(parts.network.inner.state_dict().values())).sum(0).tolist()
    return [parts.progress.step, *sums]
