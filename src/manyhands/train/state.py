"""The progress of a run, and the conversion of network and optimizer to a snapshot and back."""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyhands.checkpoint.describe import MODEL, OPTIMIZER, NetworkLayout, is_extra
from manyhands.checkpoint.read import Source, in_memory
from manyhands.checkpoint.snapshot import EXTRA_STATE, Snapshot, fitted, flatten_optimizer, plain_extra_state, unflatten
from manyhands.config.job import BY_TOP1
from manyhands.core.errors import UserError
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.spread import full_tensor
from manyhands.train.optimize import restore_optimizer


@dataclass
class Progress:
    """The progress of a run. Together with the job's seed, it determines all further random numbers."""

    step: int = 0  # updates made
    epoch: int = 0  # epochs that are complete
    step_in_epoch: int = 0  # updates made in the current epoch
    best_figure: float | None = None  # of the best evaluation so far; None before the first
    best_by: str = BY_TOP1  # what it is the best by, as train.best says it
    best_step: int = -1  # when that was, -1 before the first; foreign checkpoints don't say
    evaluated_step: int = -1  # when the last evaluation was, -1 before the first
    saved_step: int = 0  # the newest committed checkpoint, 0 before the first
    owed: bool = False  # True where an evaluation of this step was due and a stop came first

    def improves(self, by: str, figure: float) -> bool:
        """Records an evaluation and returns True if it is the best so far; starts over if train.best has changed."""
        best, sign = self.best_figure if by == self.best_by else None, 1 if by.startswith("highest") else -1
        if math.isnan(figure) or (best is not None and sign * figure <= sign * best):
            return False
        self.best_figure, self.best_by, self.best_step = figure, by, self.step
        return True

    def advance(self, steps_per_epoch: int) -> None:
        """Counts one update."""
        self.step += 1
        self.step_in_epoch += 1
        if self.step_in_epoch == steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0


def capture(
    network: ParallelNetwork,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    extra: dict[str, Any],
    *,
    keep: bool = True,
) -> Snapshot:
    """Returns the state on the CPU; for a network sharded by a plan, this process's shards.

    A collective for sharded networks; processes without `keep` get no tensors.
    """
    tensors, other = split_state(network.model)
    if network.traits.sharded:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        # What FSDP has sharded is gathered one tensor after another.
        full, optimizer_state = copied(get_state_dict(network.model, optimizer), keep=keep)
        model = {name: one for name, one in full.items() if isinstance(one, Tensor)}
        optimizer_state = optimizer_state if keep else {}
    else:
        model, optimizer_state = copied(tensors), named_optimizer(network.model, optimizer)
    best = {"step": progress.best_step if progress.best_step >= 0 else None, "figure": progress.best_figure}
    state = copied({**asdict(progress), "best": best, **extra, **other})
    return Snapshot(model, optimizer_state, state, network.traits.endless)


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns a network's tensors by name, and the extra state of its modules as plain data.

    Raises UserError: the extra state can't be saved.
    """
    state = model.state_dict()
    try:
        extra = plain_extra_state(state)
    except TypeError as error:
        hints = ("return numbers, strings, lists and dicts with string keys, or one tensor",)
        raise UserError(f"a module's get_extra_state can't be saved: {error}", "the network", hints) from None
    return {name: one for name, one in state.items() if isinstance(one, Tensor)}, extra


def copied(value: Any, *, keep: bool = True) -> Any:
    """Copies tensors to the CPU. Sharded ones are gathered by a collective; without `keep` this process gets none."""
    if isinstance(value, Tensor):
        tensor = full_tensor(value.detach())
        return tensor.to("cpu", copy=True) if keep else None
    if isinstance(value, dict):
        return {key: copied(one, keep=keep) for key, one in cast(dict[Any, Any], value).items()}
    if type(value) in {list, tuple}:
        return type(value)(copied(one, keep=keep) for one in value)
    return copy.deepcopy(value)


def named_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's state by parameter name, independent of groups and layouts."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {names[id(parameter)]: copied(values) for parameter, values in optimizer.state.items()}
    groups = [{**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": copied(groups)}


def restore(
    snapshot: Snapshot,
    network: ParallelNetwork,
    optimizer: torch.optim.Optimizer | None,
    *,
    where: str,
    source: Source | None = None,
) -> tuple[Progress, str]:
    """Restores a snapshot, under any parallel mode.

    Args:
        snapshot: the state; its tensors are unused if there is a source.
        network: the network under its parallel mode.
        optimizer: the optimizer; None to restore only the network.
        where: the checkpoint, for errors.
        source: the checkpoint opened for reading shards, for sharded networks.

    Returns:
        The progress, and the note of `restore_optimizer`.

    Raises:
        UserError: the snapshot belongs to another network.
    """
    known = {field.name for field in fields(Progress)}
    progress = Progress(**{key: value for key, value in snapshot.state.items() if key in known})
    if network.layouts:
        live = {name: layout.shape for name, layout in network.layouts.items()}
        snapshot = snapshot if source else fitted(snapshot, live)
        branches, tensors = flatten_optimizer(snapshot.optimizer or {})
        stored = {MODEL: in_memory(snapshot.model)} | ({OPTIMIZER: in_memory(tensors)} if snapshot.optimizer else {})
        opened = source or Source(Path(), "whole", {}, branches, snapshot.state, stored=stored)
        check_shapes({name: opened.model.shape(name) for name in opened.model.names()}, live, where)
        if extra := _known(extra_state(snapshot, where), network.model.state_dict(), snapshot.notes):
            network.model.load_state_dict(extra, strict=False)
        return progress, restore_pieces(opened, network, optimizer)
    # Our own optimizer state goes by the parameters' names.
    renames = optimizer is None or bool(snapshot.state.get("foreign"))
    if network.traits.sharded:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        state = fit_snapshot(snapshot, network.model, where, renames=renames)
        set_model_state_dict(network.model, state, options=StateDictOptions(full_state_dict=True, strict=False))
    else:
        load_snapshot(snapshot, network.model, where, renames=renames)
    if optimizer and snapshot.optimizer:
        return progress, restore_optimizer(snapshot.optimizer, network.model, optimizer)
    return progress, ""


def load_snapshot(snapshot: Snapshot, model: nn.Module, where: str, *, renames: bool = True) -> None:
    """Loads tensors and extra state into an unsharded network. Raises as `fit_snapshot` does."""
    state = fit_snapshot(snapshot, model, where, renames=renames)
    # A network's own `load_state_dict` may not know `strict`, which is only needed where extra state isn't saved.
    incomplete = model.state_dict().keys() - state.keys()
    model.load_state_dict(state, **({"strict": False} if incomplete else {}))


def fit_snapshot(snapshot: Snapshot, model: nn.Module, where: str, *, renames: bool = True) -> dict[str, Any]:
    """Returns the state dict for a network from a snapshot. Extra state that the network lacks is skipped, with a note.

    `renames`: names may differ as in `fit_names`. Raises UserError: the snapshot belongs to another network.
    """
    live = model.state_dict()
    fit = fitted(snapshot, live) if renames else snapshot
    saved = _known({**fit.model, **extra_state(fit, where)}, live, snapshot.notes)
    live = {name: one for name, one in live.items() if isinstance(one, Tensor) or name in saved}
    shapes, others = [
        {name: tuple(getattr(one, "shape", ())) for name, one in state.items()} for state in (saved, live)
    ]
    check_shapes(shapes, others, where, tuple(snapshot.model))
    return saved


def _known(saved: Mapping[str, Any], live: Collection[str], notes: list[str]) -> dict[str, Any]:
    """The saved values without extra state that the network lacks, which a note names."""
    unknown = [name for name in saved if is_extra(name) and name not in live]
    if unknown:
        notes.append(f"{', '.join(unknown[:3])}: ignored, because the network has no such extra state")
    return {name: one for name, one in saved.items() if name not in unknown}


def extra_state(snapshot: Snapshot, where: str) -> dict[str, Any]:
    """Returns the values for the modules' `set_extra_state`, by name. Raises UserError: the state is damaged."""
    try:
        return unflatten(snapshot.state.get(EXTRA_STATE, {}), {})
    except ValueError as error:
        raise UserError(f"the checkpoint's extra state can't be read: {error}", where) from error


def check_shapes(
    saved: Mapping[str, tuple[int, ...]], live: Mapping[str, tuple[int, ...]], where: str, names: Sequence[str] = ()
) -> None:
    """Raises UserError if saved and live tensors differ in names or shapes; lists the first differences.

    `names`: the names in the file, some of which are shown where names differ.
    """
    problems = [f"{name} is missing in the checkpoint" for name in live if name not in saved]
    problems += [f"{name} is not in the network" for name in saved if name not in live]
    problems += [
        f"{name} is {list(saved[name])} in the checkpoint and {list(shape)} in the network"
        for name, shape in live.items()
        if name in saved and saved[name] != shape and not name.endswith(EXTRA_STATE)  # whose shape may change
    ]
    if problems:
        own = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        shown = (f"compare with the names in the file: {own}",) if names and saved.keys() != live.keys() else ()
        more = f" … and {len(problems) - 3} more" if len(problems) > 3 else ""
        hints = (*shown, "use the network of the checkpoint", "or start a new run in another folder: --out DIR")
        raise UserError(f"the checkpoint belongs to another network: {'; '.join(problems[:3])}{more}", where, hints)


def restore_pieces(source: Source, network: ParallelNetwork, optimizer: torch.optim.Optimizer | None) -> str:
    """Reads this process's shards of a checkpoint into the network and its optimizer, tensor by tensor.

    Returns the note of `restore_optimizer`; without an optimizer, only the network is restored.
    """
    mesh, rank = network.layouts.mesh, network.layouts.rank
    with torch.no_grad():
        for name, tensor in network.model.state_dict().items():
            if isinstance(tensor, Tensor):  # extra state is restored with the rest
                tensor.copy_(source.model.piece(name, network.layouts[name], mesh, rank))
    if optimizer is None or source.optimizer is None:
        return ""
    layouts, stored = source.layouts(NetworkLayout(mesh, network.layouts))[OPTIMIZER], source.optimizer
    tensors = {name: stored.piece(name, layouts[name], mesh, rank) for name in stored.names()}
    return restore_optimizer(unflatten(source.branches, tensors), network.model, optimizer)
