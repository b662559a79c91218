"""Saves and loads checkpoints and the synchronization state of each rank."""

import functools
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from manyhands.checkpoint import files
from manyhands.checkpoint.files import TornCheckpointError, read_manifest
from manyhands.checkpoint.folders import prune, remove_step
from manyhands.checkpoint.read import load
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.trained import STATE_KEY
from manyhands.checkpoint.write import SaveError
from manyhands.checkpoint.write import save as commit
from manyhands.core.errors import RunError, UserError
from manyhands.core.machine import memory
from manyhands.core.phases import CLOCK, SAVING
from manyhands.core.resuming import resume_command
from manyhands.core.run_folder import NOWHERE
from manyhands.core.world import World
from manyhands.parallel.apply import checksums
from manyhands.parallel.group.plain import gather_plain
from manyhands.train.diagnose import explain_lost
from manyhands.train.saver import NOT_FINITE, SAVED, SaveOutcome
from manyhands.train.schedule import CustomScheduler
from manyhands.train.state import capture, named_optimizer, peers_of, restore_optimizer, save_sharded, split_state
from manyhands.train.trainer import Trainer


@CLOCK.within(SAVING)
def save(trainer: Trainer) -> None:
    """Starts writing a checkpoint, in the background where possible; a collective. `finish_save` returns its result."""
    finish_save(trainer)
    network, progress, started = trainer.network, trainer.progress, time.perf_counter()
    trainer.phase = "save"
    extra = _beside_the_network(trainer)
    trainer.synchronizer.average_buffers(progress.step)
    save_rank_state(trainer)
    writes = trainer.world.is_main or bool(network.layouts) or trainer.world.rank in trainer.writers
    write, beside = None, not network.layouts
    if writes or network.share.collective_forward:
        with trainer.synchronizer.averaged():
            snapshot = capture(network, trainer.update.optimizer, progress, extra, keep=writes)
        # What is saved says of itself that it is.
        snapshot.state["saved_step"] = progress.step
        beside = beside and memory()[1] > sum(tensor.nbytes for tensor in snapshot.model.values())
        write = functools.partial(_write, trainer, snapshot, progress.step, progress.best_step) if writes else None
    trainer.saves += 1
    trainer.saver.waited_s = time.perf_counter() - started
    trainer.saver.begin(progress.step, write, beside=beside)
    trainer.status_round.saved()
    trainer.saver.stalled_s = time.perf_counter() - started
    trainer.status_round.leave_out(trainer.saver.stalled_s)
    if network.layouts:
        finish_save(trainer)
    trainer.phase = "train"


@CLOCK.within(SAVING)
def finish_save(trainer: Trainer, *, written: int | None = None) -> None:
    """Waits for the save in progress, if any, and handles its result; a collective.

    After a disk error, the run continues without this checkpoint, with a warning.

    Args:
        trainer: the trainer.
        written: the number of processes that have finished writing; given to avoid waiting.
    """
    saver, started = trainer.saver, time.perf_counter()
    step = saver.step
    if step is None or written not in {None, len(trainer.writers)}:
        return
    # Where all have written, nobody has a reason to come late: whoever does stands still.
    phase, trainer.phase = trainer.phase, "save" if written is None else trainer.phase
    own = saver.end()
    answers = gather_plain(own and asdict(own), trainer.world)
    trainer.phase = phase
    outcomes = {rank: SaveOutcome(**answers[rank]) for rank in trainer.writers}
    if any(outcome.word == NOT_FINITE for outcome in outcomes.values()):
        raise explain_lost(trainer.network, trainer.world, trainer.update.measured)
    if outcomes[0].word == SAVED:
        trainer.progress.saved_step = step
        prune_rank_states(trainer)
    for rank, outcome in outcomes.items():
        if outcome.word != SAVED:
            which = f"checkpoint copy on rank {rank}'s machine" if rank else "checkpoint"
            trainer.journal.event("warning", f"the {which} was not saved at step {step}: {outcome.what}", step)
    _compare(trainer, step, outcomes)
    took_s = time.perf_counter() - started
    trainer.status_round.leave_out(took_s)
    trainer.weigh_save(saver.stalled_s + took_s)


def _compare(trainer: Trainer, step: int, outcomes: dict[int, SaveOutcome]) -> None:
    """Reports copies of a checkpoint that differ, and checks the replicas to name the rank and tensor."""
    copies = {rank: outcome.digests for rank, outcome in outcomes.items() if outcome.word == SAVED}
    for rank, digests in copies.items():
        other = [name for name, digest in copies.get(0, digests).items() if digests.get(name) != digest]
        if other:
            trainer.verify_replicas()
            message = f"the checkpoint copies of ranks 0 and {rank} differ at step {step}: {', '.join(other)}"
            trainer.journal.event("warning", message, step)


def rescue(trainer: Trainer) -> bool:
    """Saves the last update on this process after another process failed; returns True if it was saved.

    All processes have the same network, so the process with the latest update saves for all, and no update is lost.
    Impossible if the network is sharded, or if processes have state of their own.
    """
    network, progress = trainer.network, trainer.progress
    held_alone = network.traits.sharded or network.layouts or trainer.synchronizer.own
    # A scheduler of somebody else's has moved on with an update's beginning.
    partial_update = trainer.update.partial_update
    between = partial_update.in_pieces or (
        partial_update.begun and isinstance(trainer.update.set_rates, CustomScheduler)
    )
    if held_alone or between or not progress.step or trainer.folder is NOWHERE:
        return False
    partial_update.undo()
    # The others may have failed before all could agree that it is to be made.
    progress.owed |= trainer.evaluation_due() and progress.evaluated_step != progress.step
    folder = trainer.folder.checkpoints
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = capture(network, trainer.update.optimizer, progress, _beside_the_network(trainer))
    snapshot.state["saved_step"] = progress.step
    with FileLock(trainer.folder.ranks / "rescue.lock", mode=0o600):  # a second one finds that it is done
        path = commit(folder, progress.step, snapshot)
    trainer.journal.event("saved", path.name, progress.step)
    return True


def _beside_the_network(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint holds beside the network, its optimizer and how far they have come."""
    extra: dict[str, Any] = {
        "job": trainer.digest,
        "classes": list(trainer.classes),
        "model": trainer.job.model.name,
        STATE_KEY: trainer.trained.model_dump(mode="json"),
        **trainer.noted(),
        "sync": {**asdict(trainer.sync), "processes": trainer.world.size},
        "most_in_a_pass": trainer.feed.sharing.most,
    }
    if trainer.balance_shares:
        extra["shares"] = list(trainer.feed.sharing.shares) or [1] * trainer.feed.sharing.processes
    if trainer.update.gradients.scaler:
        extra["scaler"] = trainer.update.gradients.scaler.state_dict()
    if isinstance(trainer.update.set_rates, CustomScheduler):
        extra["schedule"] = trainer.update.set_rates.saved()
    return extra


def save_last(trainer: Trainer) -> None:
    """Saves the end of a run. Unlike in `finish_save`, a failed save ends the run with an error.

    Raises:
        RunError: the last step was not saved; raised on all processes.
    """
    save(trainer)
    finish_save(trainer)
    if trainer.progress.saved_step != trainer.progress.step:
        raise RunError(
            f"step {trainer.progress.step} could not be saved; the last warning gives the reason",
            str(trainer.folder.checkpoints),
            (f"free disk space, then resume from the last checkpoint: {resume_command(trainer.folder.path)}",),
        )


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
    """Writes the checkpoint, and deletes what it makes superfluous; reads nothing that training changes meanwhile."""
    folder, network, started = trainer.folder.checkpoints, trainer.network, time.perf_counter()
    if network.layouts:
        peers = peers_of(trainer.world, trainer.writers)
        path = save_sharded(folder, step, snapshot, network, peers, pieces=trainer.job.checkpoint.pieces)
    else:
        path = commit(folder, step, snapshot)
    if trainer.world.rank not in trainer.writers:  # gave its pieces; the checkpoint lies on other machines
        return SaveOutcome(SAVED, path.name)
    best = folder / f"step-{best_step:08d}"
    prune(folder, trainer.job.checkpoint.keep, best if best.is_dir() else None)
    waited_s, seconds = trainer.saver.waited_s, time.perf_counter() - started
    trainer.journal.event("saved", path.name, step, seconds=seconds, waited=waited_s)
    entries = read_manifest(path)["files"]
    # A sync method may leave each process an optimizer's state of its own.
    alike = (files.MODEL,) if trainer.synchronizer.own else (files.MODEL, files.OPTIMIZER)
    return SaveOutcome(SAVED, path.name, {name: entries[name]["sha256"] for name in alike if name in entries})


def rank_states_folder(checkpoints: Path, world: World) -> Path:
    """Returns the folder for the synchronization state of this process."""
    return checkpoints / f"rank-{world.rank:05d}-of-{world.size:05d}"


def save_rank_state(trainer: Trainer) -> None:
    """Saves the synchronization state of each process; a collective. A failure is reported and doesn't end the run."""
    own = trainer.synchronizer.state()
    if own is None:
        return
    tensors, numbers = own
    step, folder = trainer.progress.step, rank_states_folder(trainer.folder.checkpoints, trainer.world)
    state: dict[str, Any] = {"belongs_to": _belongs_to(trainer), "numbers": numbers, "own": trainer.synchronizer.own}
    if trainer.update.gradients.scaler:
        state["scaler"] = trainer.update.gradients.scaler.state_dict()
    content = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    endless = frozenset({"buffers"} if trainer.network.traits.endless else set[str]())
    optimizer = named_optimizer(trainer.network.model, trainer.update.optimizer)
    said = ""
    try:
        remove_step(folder, step)  # of an earlier attempt, whose steps may have gone otherwise
        commit(folder, step, Snapshot(content, optimizer, state, endless))
    except SaveError as error:
        said = error.message
    for rank, word in enumerate(gather_plain(said, trainer.world)):
        if word:
            trainer.journal.event("warning", f"rank {rank} could not save its synchronization state: {word}", step)


def prune_rank_states(trainer: Trainer) -> None:
    """Deletes the synchronization states of deleted checkpoints, after a newer one has been committed."""
    if trainer.synchronizer.own:
        folder = rank_states_folder(trainer.folder.checkpoints, trainer.world)
        best = folder / f"step-{trainer.progress.best_step:08d}"
        prune(folder, trainer.job.checkpoint.keep, best if best.is_dir() else None)


def load_rank_state(trainer: Trainer, checkpoint: Path) -> None:
    """Restores the synchronization state of each process, if all processes find theirs; a collective.

    Args:
        trainer: the trainer, whose network and progress are restored already.
        checkpoint: the checkpoint folder, which may be on another machine.
    """
    if not trainer.synchronizer.own:
        return
    trainer.synchronizer.begin()
    found, said = _find(trainer, checkpoint)
    words = gather_plain(said, trainer.world)
    missing = [rank for rank, word in enumerate(words) if word]
    if missing or not found:
        what = f"resuming without the synchronization state of rank {missing[0]}: {words[missing[0]]}"
        trainer.journal.event("warning", what, trainer.progress.step)
        return
    trainer.synchronizer.load(found.model, {key: int(value) for key, value in found.state["numbers"].items()})
    anew = restore_optimizer(found.optimizer or {"state": {}}, trainer.network, trainer.update.optimizer)
    if anew:
        trainer.journal.event("warning", anew, trainer.progress.step)
    if trainer.update.gradients.scaler and "scaler" in found.state:
        trainer.update.gradients.scaler.load_state_dict(found.state["scaler"])


def _find(trainer: Trainer, checkpoint: Path) -> tuple[Snapshot | None, str]:
    """Returns the synchronization state of this process at a checkpoint, or the reason why it can't be used."""
    # The run's own folder, and the one that it resumes from, which may belong to another run.
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
    """Identifies a checkpoint among those of the same step: checksums of the synchronized network."""
    with trainer.synchronizer.averaged():
        sums = checksums(list(split_state(trainer.network.model)[0].values())).sum(0).tolist()
    return [trainer.progress.step, *sums]
