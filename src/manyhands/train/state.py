"""The state of a run: its progress, snapshots of network and optimizer, and the checkpoint that it resumes from."""

import contextlib
import copy
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.checkpoint import files
from manyhands.checkpoint.describe import OPTIMIZER, NetworkLayout, is_extra_state
from manyhands.checkpoint.folders import choose_checkpoint, newest_checkpoint, saved_step
from manyhands.checkpoint.read import Source, load_checkpoint, open_checkpoint, source_from_snapshot
from manyhands.checkpoint.snapshot import EXTRA_STATE, Snapshot, flatten, plain_extra_state, renamed, unflatten
from manyhands.config.job import BY_TOP1, Job
from manyhands.core.errors import UserError, first_names
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel.group.plain import broadcast_plain, broadcast_tensors, gather_plain
from manyhands.parallel.network import ParallelNetwork, full_tensor
from manyhands.train.optimize import restore_optimizer

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name


@dataclass
class Progress:
    """The progress of a run. Together with the job's seed, it determines all further random numbers."""

    step: int = 0  # updates made
    epoch: int = 0  # epochs that are complete
    step_in_epoch: int = 0  # updates made in the current epoch
    best_figure: float | None = None  # value of the best evaluation so far; None before the first
    best_by: str = BY_TOP1  # train.best of that evaluation
    best_step: int = -1  # step of that evaluation; -1 before the first, and in foreign checkpoints
    evaluated_step: int = -1  # step of the last evaluation; -1 before the first
    saved_step: int = 0  # step of the newest committed checkpoint; 0 before the first
    owed: bool = False  # an evaluation of this step is due and has not run; `record_evaluation` clears it

    def record_if_best(self, by: str, figure: float) -> bool:
        """Records `figure`, and returns True, if it is the best so far by the criterion `by`, a value of train.best."""
        best, sign = self.best_figure if by == self.best_by else None, 1 if by.startswith("highest") else -1
        if math.isnan(figure) or (best is not None and sign * figure <= sign * best):
            return False
        self.best_figure, self.best_by, self.best_step = figure, by, self.step
        return True

    def advance(self, steps_per_epoch: int) -> None:
        self.step += 1
        self.step_in_epoch += 1
        if self.step_in_epoch == steps_per_epoch:
            self.end_epoch()

    def end_epoch(self) -> None:
        self.epoch, self.step_in_epoch = self.epoch + 1, 0


def capture(
    network: ParallelNetwork, optimizer: Optimizer, progress: Progress, extra: dict[str, Any], *, keep: bool = True
) -> Snapshot:
    """Copies the state (with a plan, local shards) to the CPU. Without `keep`, no tensors. A collective if sharded."""
    tensors, other = split_state(network.model)
    if network.traits.sharded:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        # FSDP's shards are gathered one tensor after another.
        full, optimizer_state = copy_to_cpu(get_state_dict(network.model, optimizer), keep=keep)
        model = {name: one for name, one in full.items() if isinstance(one, Tensor)}
        optimizer_state = optimizer_state if keep else {}
    else:
        model, optimizer_state = copy_to_cpu(tensors), named_optimizer(network.model, optimizer)
    best = {"step": progress.best_step if progress.best_step >= 0 else None, "figure": progress.best_figure}
    state = copy_to_cpu({**asdict(progress), "best": best, **extra, **other})
    return Snapshot(model, optimizer_state, state, network.traits.nonfinite_buffers)


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns two dicts: a network's tensors, and its extra state. Raises UserError if that isn't plain data."""
    state = model.state_dict()
    try:
        extra = plain_extra_state(state)
    except TypeError as error:
        hints = ("return one tensor, or numbers, strings, lists and dicts with string keys, from get_extra_state",)
        raise UserError(f"a module's get_extra_state can't be saved: {error}", "the network", hints) from None
    return {name: one for name, one in state.items() if isinstance(one, Tensor)}, extra


def copy_to_cpu(value: Any, *, keep: bool = True) -> Any:
    """Copies nested data to the CPU, with tensors unsharded or, without `keep`, None. A collective if sharded."""
    if isinstance(value, Tensor):
        tensor = full_tensor(value.detach())
        return tensor.to("cpu", copy=True) if keep else None
    if isinstance(value, dict):
        return {key: copy_to_cpu(one, keep=keep) for key, one in cast(dict[Any, Any], value).items()}
    if type(value) in {list, tuple}:
        return type(value)(copy_to_cpu(one, keep=keep) for one in value)
    return copy.deepcopy(value)


def named_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {names[id(parameter)]: copy_to_cpu(values) for parameter, values in optimizer.state.items()}
    groups = [{**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": copy_to_cpu(groups)}


@dataclass(frozen=True)
class Resumable:
    """A checkpoint to resume from."""

    snapshot: Snapshot  # without tensors if `source` is set
    path: Path
    notes: tuple[str, ...] = ()  # sentences for the user, such as why a newer checkpoint was skipped
    source: Source | None = None  # the checkpoint opened for reading shards


def restore_state(found: Resumable, network: ParallelNetwork, optimizer: Optimizer | None) -> tuple[Progress, str]:
    """Loads a checkpoint under any parallel mode. Returns the progress, and the result of `restore_optimizer`.

    Without an optimizer, loads only the network. Raises UserError if the checkpoint belongs to another network.
    """
    snapshot, source, where = found.snapshot, found.source, str(found.path)
    known = {field.name for field in fields(Progress)}
    progress = Progress(**{key: value for key, value in snapshot.state.items() if key in known})
    if network.layouts:
        live = {name: layout.shape for name, layout in network.layouts.items()}
        snapshot = snapshot if source else renamed(snapshot, live)
        opened = source or source_from_snapshot(snapshot)
        check_shapes({name: opened.model.shape(name) for name in opened.model.names()}, live, where)
        if extra := _drop_unknown(extra_state(snapshot, where), network.model.state_dict(), snapshot.notes):
            network.model.load_state_dict(extra, strict=False)
        return progress, _restore_shards(opened, network, optimizer)
    # manyhands stores optimizer state by parameter name, so the names must stay.
    renames = optimizer is None or bool(snapshot.state.get("foreign"))
    if network.traits.sharded:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        state = matching_state_dict(snapshot, network.model, where, renames=renames)
        set_model_state_dict(network.model, state, options=StateDictOptions(full_state_dict=True, strict=False))
    else:
        load_snapshot(snapshot, network.model, where, renames=renames)
    if optimizer and snapshot.optimizer:
        return progress, restore_optimizer(snapshot.optimizer, network.model, optimizer)
    return progress, ""


def load_snapshot(snapshot: Snapshot, model: nn.Module, where: str, *, renames: bool = True) -> None:
    """Loads tensors and extra state into an unsharded network. Raises UserError if they don't match."""
    state = matching_state_dict(snapshot, model, where, renames=renames)
    # A custom `load_state_dict` may lack `strict`, which is needed only if extra state isn't saved.
    incomplete = model.state_dict().keys() - state.keys()
    model.load_state_dict(state, **({"strict": False} if incomplete else {}))


def matching_state_dict(snapshot: Snapshot, model: nn.Module, where: str, *, renames: bool = True) -> dict[str, Any]:
    """Returns a snapshot as a state dict for `model`. Skips extra state that the network lacks, and adds a note.

    With `renames`, adds or removes prefixes such as "module.". Raises UserError if names or shapes don't match.
    """
    live = model.state_dict()
    fit = renamed(snapshot, live) if renames else snapshot
    saved = _drop_unknown({**fit.model, **extra_state(fit, where)}, live, snapshot.notes)
    live = {name: one for name, one in live.items() if isinstance(one, Tensor) or name in saved}
    shapes, others = ({name: tuple(getattr(one, "shape", ())) for name, one in each.items()} for each in (saved, live))
    check_shapes(shapes, others, where, tuple(snapshot.model))
    return saved


def _drop_unknown(saved: Mapping[str, Any], live: Collection[str], notes: list[str]) -> dict[str, Any]:
    """Returns the saved values, except extra state that the network lacks. Adds a note about it to `notes`."""
    unknown = [name for name in saved if is_extra_state(name) and name not in live]
    if unknown:
        notes.append(f"{', '.join(unknown[:3])}: ignored, because the network has no such extra state")
    return {name: one for name, one in saved.items() if name not in unknown}


def extra_state(snapshot: Snapshot, where: str) -> dict[str, Any]:
    try:
        return unflatten(snapshot.state.get(EXTRA_STATE, {}), {})
    except ValueError as error:
        raise UserError(f"the checkpoint's extra state can't be read: {error}", where) from error


def check_shapes(saved: Shapes, live: Shapes, where: str, names: Sequence[str] = ()) -> None:
    """Raises UserError if saved and live shapes differ. `names`: the names in the file, for a hint."""
    problems = [f"{name} is missing in the checkpoint" for name in live if name not in saved]
    problems += [f"{name} is not in the network" for name in saved if name not in live]
    problems += [
        f"{name} is {list(saved[name])} in the checkpoint and {list(shape)} in the network"
        for name, shape in live.items()
        if name in saved and saved[name] != shape and not name.endswith(EXTRA_STATE)  # whose shape may change
    ]
    if problems:
        some = f"compare with the names in the file: {first_names(names, 3)}"
        shown = (some,) if names and saved.keys() != live.keys() else ()
        more = f" … and {len(problems) - 3} more" if len(problems) > 3 else ""
        hints = (*shown, "use the network of the checkpoint", "or start a new run in another folder: --out DIR")
        raise UserError(f"the checkpoint belongs to another network: {'; '.join(problems[:3])}{more}", where, hints)


def _restore_shards(source: Source, network: ParallelNetwork, optimizer: Optimizer | None) -> str:
    """Reads this process's shards into network and optimizer. Returns the result of `restore_optimizer`."""
    mesh, rank = network.layouts.mesh, network.layouts.rank
    with torch.no_grad():
        for name, tensor in network.model.state_dict().items():
            if isinstance(tensor, Tensor):  # extra state is restored separately
                tensor.copy_(source.model.shard(name, network.layouts[name], mesh, rank))
    if optimizer is None or source.optimizer is None:
        return ""
    layouts, stored = source.layouts(NetworkLayout(mesh, network.layouts))[OPTIMIZER], source.optimizer
    tensors = {name: stored.shard(name, layouts[name], mesh, rank) for name in stored.names()}
    return restore_optimizer(unflatten(source.branches, tensors), network.model, optimizer)


def find_resumable(resume: str, folder: RunFolder, world: World, *, in_pieces: bool = False) -> Resumable | None:
    """Returns the checkpoint that a run resumes from, or None for a new run. A collective.

    Rank 0 selects the checkpoint, and sends the content to processes that don't have the same file. With `in_pieces`,
    each process reads its own shards later if all have the same file. `resume`: checkpoint.resume, or a path.
    """
    found = None
    # Another machine may lack the files, and receives the state below.
    with contextlib.nullcontext() if world.is_main else contextlib.suppress(UserError):
        found = _find_resumable(resume, folder, in_pieces=in_pieces)
    identity = ""
    if found:  # the hash of the file, or of the manifest, which contains the hash of every file
        with (found.path / files.MANIFEST if found.path.is_dir() else found.path).open("rb") as content:
            identity = hashlib.file_digest(content, "sha256").hexdigest()
    if len({*gather_plain(identity, world)}) == 1:
        return found
    if found and found.source:  # tensors are sent to processes that don't see the files
        found = replace(found, snapshot=found.source.snapshot(), source=None)
    return _broadcast_resumable(found, world)


def _broadcast_resumable(found: Resumable | None, world: World) -> Resumable | None:
    tensors: dict[str, Tensor] = {}
    tree = None
    if found and world.is_main:
        optimizer = found.snapshot.optimizer
        if optimizer:
            # Other tools number the parameters, but JSON keys are strings.
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


def _find_resumable(resume: str, folder: RunFolder, *, in_pieces: bool) -> Resumable | None:
    if resume == "never":
        return None
    if resume == "auto":
        path, skipped = newest_checkpoint(folder.checkpoints)
        if path is None and skipped:
            hints = (*skipped[:3], "start a new run in another folder: --out DIR")
            raise UserError("no checkpoint of this run can be read", str(folder.checkpoints), hints)
        saved = None if path else saved_step(folder)
        if saved is not None:
            hints = ("restore checkpoints/ from a copy or from rank 0's machine", "or start a new run: --out DIR")
            what = f"step {saved} was saved, but the run has no checkpoint now"
            raise UserError(what, str(folder.checkpoints), hints)
        if path is None:
            return None
    else:
        reference = Path(resume).expanduser()
        if not reference.exists():
            hints = ("choose auto, never, a run folder, a checkpoint folder or a weights file",)
            raise UserError(f"{resume} doesn't exist", "--resume", hints)
        path, skipped = choose_checkpoint(reference, "last")
    if not in_pieces or not path.is_dir():
        return Resumable(read_snapshot(path), path, tuple(skipped))
    source = open_checkpoint(path, verified=True)  # verified just now
    return Resumable(Snapshot({}, None, dict(source.state)), path, tuple(skipped), source)


def read_snapshot(path: Path) -> Snapshot:
    """Reads a checkpoint of manyhands or of another tool."""
    if path.is_dir():
        return load_checkpoint(path)
    from manyhands.checkpoint.foreign import read_foreign

    return read_foreign(path)


def foreign_outputs(snapshot: Snapshot) -> int:
    """Returns the number of outputs (the last tensor's length) in another tool's checkpoint, or 0 for one of ours."""
    if not snapshot.state.get("foreign") or not snapshot.model:
        return 0
    last = list(snapshot.model.values())[-1]
    return last.shape[0] if last.ndim else 0


def training_digest(job: Job, length: int) -> str:
    """Returns a digest of the settings that select samples. A run can resume within an epoch if it is the same."""
    text = f"{length} {job.train.batch} {job.train.seed} {job.train.drop_last}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_resume_position(snapshot: Snapshot, digest: str, steps_per_epoch: int, names: list[str], where: str) -> None:
    """Recomputes the step if another tool saved it, or `training_digest` changed (UserError if within an epoch)."""
    state = snapshot.state
    if state.get("foreign"):
        if snapshot.optimizer is not None:
            from manyhands.checkpoint.foreign import name_optimizer

            snapshot.optimizer = name_optimizer(snapshot.optimizer, names)
        epoch, figure = int(state.get("epoch", 0)), state.get("best", {}).get("top1")
        state.update(epoch=epoch, step=epoch * steps_per_epoch, step_in_epoch=0, evaluated_step=-1)
        state.update(best_step=-1, best_figure=figure)
        return
    if state.get("job") == digest:
        return
    if state.get("step_in_epoch", 0):
        what = "the checkpoint is from the middle of an epoch, but train.batch, train.seed or the data changed"
        hints = ("restore train.batch, train.seed and the data", "or resume from a checkpoint at the end of an epoch")
        raise UserError(what, where, hints)
    state["step"] = int(state.get("epoch", 0)) * steps_per_epoch


def refuse_later_checkpoints(folder: Path, step: int) -> None:
    """Raises UserError if `folder` has a checkpoint later than `step`, because the next start would resume from it."""
    later = [path for path in files.step_folders(folder) if (files.step_of(path) or 0) > step]
    path = newest_checkpoint(folder)[0] if later else None
    if path in later:  # readers skip torn checkpoints
        what = f"the run would resume from step {step}, but its folder has a later checkpoint, {path.name}"
        hints = ("resume in another folder: --out NEW --resume CHECKPOINT", "or restore the earlier train.batch")
        raise UserError(what, str(folder), hints)
