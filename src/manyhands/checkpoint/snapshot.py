"""The in-memory state of a run: tensors and plain data."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from manyhands.checkpoint.describe import fit_names, is_extra_state, written_order
from manyhands.core.files import UnreadableError

EXTRA_STATE = "extra_state"  # key of a snapshot's state: the results of modules' `get_extra_state`
_TENSOR = "$tensor"
_TUPLE = "$tuple"
_COUNTER, _MEAN = "num_batches_tracked", "running_mean"  # of BatchNorm


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of a .safetensors file into new memory, in the order in which they were written."""
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name).clone() for name in written_order(file)}


def flatten(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Moves the tensors of nested dicts, lists and tuples into `tensors`. A tensor's name is its path below `name`.

    Returns JSON data with {"$tensor": name} in place of tensors. Raises TypeError for values of other types.
    """
    if isinstance(tree, Tensor):
        key = name if name not in tensors else f"{name}#{len(tensors)}"
        tensors[key] = tree
        return {_TENSOR: key}
    if isinstance(tree, dict):
        if wrong := [key for key in tree if not isinstance(key, str) or key.startswith("$")]:
            raise TypeError(f"{name} has a key that can't be saved: {wrong[0]!r}")
        return {key: flatten(value, f"{name}/{key}", tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [flatten(value, f"{name}/{number}", tensors) for number, value in enumerate(tree)]
        return items if isinstance(tree, list) else {_TUPLE: items}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"{name} is a {type(tree).__name__}, which can't be saved as plain data")


def plain_extra_state(state_dict: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns modules' extra state as {"extra_state": {name: JSON data}}, or {}. Raises TypeError for other data."""
    found, inner = dict[str, Any](), dict[str, Tensor]()
    for name, value in state_dict.items():
        if not isinstance(name, str) or not (isinstance(value, Tensor) or is_extra_state(name)):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a tensor")
        if not isinstance(value, Tensor):
            found[name] = flatten(value, name, inner)
    if inner:
        raise TypeError(f"{next(iter(inner))} is a tensor; register it as a buffer")
    return {EXTRA_STATE: found} if found else {}


def flatten_optimizer(optimizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    return {key: flatten(value, key, tensors) for key, value in optimizer.items()}, tensors


def tensor_owners(branches: dict[str, Any]) -> dict[str, str]:
    """Maps the names of tensors in a flattened optimizer state to the names of their parameters."""
    return {
        value[_TENSOR]: parameter
        for parameter, entries in branches.get("state", {}).items()
        for value in entries.values()
        if isinstance(value, dict) and isinstance(value.get(_TENSOR), str)
    }


def unflatten(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Converts the result of `flatten` back. Raises UnreadableError if a tensor is missing."""
    if isinstance(tree, list):
        return [unflatten(value, tensors) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        if not isinstance(tree[_TENSOR], str) or tree[_TENSOR] not in tensors:
            raise UnreadableError(f"the tensor is missing: {tree[_TENSOR]}")
        return tensors[tree[_TENSOR]]
    if isinstance(tree.get(_TUPLE), list):
        return tuple(unflatten(value, tensors) for value in tree[_TUPLE])
    return {key: unflatten(value, tensors) for key, value in tree.items()}


@dataclass
class Snapshot:
    """The state of a run at one step, on one process."""

    model: dict[str, Tensor]  # CPU tensors by name, as in the network or in another tool's file
    # {"state": {parameter: {key: Tensor or number}}, "param_groups": [{"params": [names], "lr": …}]}, the form of
    # torch's get_optimizer_state_dict with full_state_dict
    optimizer: dict[str, Any] | None = None
    state: dict[str, Any] = field(default_factory=dict)  # JSON data: step, epoch, best, scaler, extra_state …
    allowed_nonfinite: frozenset[str] = frozenset()  # buffers whose initial values are infinite or NaN
    notes: list[str] = field(default_factory=list[str])  # messages about ignored extra state


def renamed(snapshot: Snapshot, wanted: Collection[str]) -> Snapshot:
    """Renames tensors to a network's names (see `fit_names`). Adds BatchNorm counters, which old files lack."""
    extra = snapshot.state.get(EXTRA_STATE, {})
    names = fit_names([*snapshot.model, *extra], wanted)
    model = {names[key]: one for key, one in snapshot.model.items() if key in names}
    counters = [name for name in wanted if name.endswith(_COUNTER) and name.removesuffix(_COUNTER) + _MEAN in model]
    model = {**{name: torch.zeros((), dtype=torch.int64) for name in counters}, **model}
    state = {EXTRA_STATE: {names[key]: one for key, one in extra.items()}} if extra else {}
    return replace(snapshot, model=model, state={**snapshot.state, **state})
