"""Reads and writes files of other tools: PyTorch's ImageNet example (main.py), state dicts, .safetensors."""

import contextlib
import io
import itertools
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.checkpoint.files import damaged_error
from manyhands.checkpoint.snapshot import EXTRA_STATE, Snapshot, plain_extra_state, read_tensors, unflatten
from manyhands.core.errors import UserError, first_names, shortened
from manyhands.core.files import replaced_on_success

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_BEST = ("best_acc1", "best_prec1")  # keys of main.py since 2019, and before
_LIGHTNING = "pytorch-lightning_version"
_AGAIN = ("write the file again with PyTorch's ImageNet example, main.py, or save only its state_dict",)

_MOST_BYTES, _MOST_STEPS = 32 << 20, 2_000_000  # scan limits; a network's pickle is far smaller without tensors
# Objects that torch loads with weights_only: tensors and plain data.
_HARMLESS = re.compile(r"torch\._utils\._rebuild\w+|torch\.(storage\.)?\w+Storage|collections\.OrderedDict")


def read_foreign(path: Path) -> Snapshot:
    """Reads a state dict, .safetensors or .pth.tar of PyTorch's ImageNet example, main.py; runs no code in the file.

    `model` keeps the file's names (see `fit_names`), `optimizer` main.py's parameter numbers (see `name_optimizer`).
    `state` has "foreign" ("imagenet-main", "state-dict" or "safetensors"), and for main.py "arch", "epoch", "best"
    (top1, 0 to 1) and "scheduler". Raises UserError if the file is missing or damaged, or contains code or no weights.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    content = _load_file(path)
    weights = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), dict)), content)
    extra = None
    with contextlib.suppress(TypeError):
        extra = plain_extra_state(weights)
    if extra is None or not any(isinstance(value, Tensor) for value in weights.values()):
        found = ", ".join(repr(key) for key in list(weights)[:6]) or "nothing"
        hints = (f"save tensors by name, or a dict with one of {', '.join(_WRAPPERS)}; found {found}",)
        raise UserError(f"{path.name} contains no network weights", str(path), hints)
    model = {name: value.detach() for name, value in weights.items() if isinstance(value, Tensor)}
    if path.name.endswith(".safetensors"):
        return Snapshot(model, None, {"foreign": "safetensors"})
    if weights is not content.get("state_dict") or _LIGHTNING in content:
        return Snapshot(model, None, {"foreign": "state-dict", **extra})
    return Snapshot(model, _imagenet_optimizer(content, path), {**_imagenet_state(content, path), **extra})


def name_optimizer(optimizer_state: dict[str, Any], parameter_names: list[str]) -> dict[str, Any]:
    """Replaces the parameter numbers in an optimizer's state dict by names, in order, as in `Snapshot.optimizer`."""
    groups = optimizer_state["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) != len(parameter_names):
        what = f"the saved optimizer has {len(numbers)} parameters, this network has {len(parameter_names)}"
        raise UserError(what, hints=("resume with the network of the checkpoint, or give --resume never",))
    names = dict(zip(numbers, parameter_names, strict=True))
    return {
        "state": {names[number]: dict(entries) for number, entries in optimizer_state["state"].items()},
        "param_groups": [{**group, "params": [names[n] for n in group["params"]]} for group in groups],
    }


def write_foreign(path: Path, snapshot: Snapshot, arch: str, prefix: str = "module.") -> Path:
    """Writes checkpoint.pth.tar of PyTorch's ImageNet example, main.py, atomically; main.py's --resume reads the file.

    The optimizer must be SGD. `snapshot.state` may have "epoch", "best" and "scheduler". Parameter groups are merged
    into one, with the learning rate and weight decay of the first. `prefix` precedes each parameter's name, and is
    "module." in main.py's files from GPUs and "" from CPUs. Raises UserError if there is no optimizer state.
    """
    if snapshot.optimizer is None:
        raise UserError("the checkpoint has no optimizer state, which the ImageNet example, main.py, needs to resume")
    epoch, other = int(snapshot.state.get("epoch", 0)), unflatten(snapshot.state.get(EXTRA_STATE, {}), {})
    # main.py has one parameter group and numbers the parameters in the network's order.
    groups = snapshot.optimizer["param_groups"]
    held = {name for group in groups for name in group["params"]}
    numbers = {name: number for number, name in enumerate(name for name in snapshot.model if name in held)}
    state = {numbers[name]: entries for name, entries in snapshot.optimizer["state"].items()}
    content = {
        "epoch": epoch,
        "arch": arch,
        "state_dict": {prefix + name: one for name, one in (snapshot.model | other).items()},
        "best_acc1": torch.tensor((snapshot.state.get("best") or {}).get("top1", 0.0) * 100),
        "optimizer": {"state": state, "param_groups": [{**groups[0], "params": list(range(len(numbers)))}]},
        "scheduler": _step_schedule(snapshot.state.get("scheduler"), epoch, groups[0]),
    }
    with replaced_on_success(path) as part, part.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    return path


def _load_file(path: Path) -> dict[str, Any]:
    try:
        if path.name.endswith(".safetensors"):
            return dict(read_tensors(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols that torch itself doesn't write
            content = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise _unloadable_error(path) from error
    except Exception as error:  # torch's unpickler raises struct.error, KeyError and others
        # Besides BadZipFile: damaged names raise ValueError, unknown ZIP versions NotImplementedError.
        damage, script = (zipfile.BadZipFile, OSError, NotImplementedError, ValueError), False
        with contextlib.suppress(*damage), zipfile.ZipFile(path) as archive:
            script = any(name.endswith("/constants.pkl") for name in archive.namelist())
        if not script:
            raise damaged_error(path) from error
        hints = ("if you trust the file: torch.save(torch.jit.load(FILE).state_dict(), 'weights.pth')",)
        raise UserError(f"{path.name} is not loaded: TorchScript files contain code", str(path), hints) from error
    if not isinstance(content, dict):
        what = f"{path.name} holds a {type(content).__name__}, not a network's weights"
        raise UserError(what, str(path), ("save model.state_dict() instead",))
    return content


def _unloadable_error(path: Path) -> UserError:
    found = object_names(path)
    if not found:
        return damaged_error(path)
    shown = first_names([*map(shortened, found)], 3)
    hints = (
        "save only tensors and plain data, since other objects could run code",
        "if you trust the file: load it in Python and save its state_dict() with safetensors.torch.save_file",
    )
    if any(name.startswith(("lightning.", "pytorch_lightning.")) for name in found):
        hints = (hints[0], "for Lightning: torch.save(MODEL.load_from_checkpoint(FILE).state_dict(), 'weights.pth')")
    return UserError(f"{path.name} holds Python objects ({shown}), which are not loaded", str(path), hints)


def _imagenet_state(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns epoch, best score … of a file of PyTorch's ImageNet example, main.py, whose best_acc1 is in percent."""
    state: dict[str, Any] = {"foreign": "imagenet-main", "epoch": int(_get_number(content, "epoch", path))}
    if isinstance(content.get("arch"), str):
        state["arch"] = content["arch"]
    best = next((key for key in _BEST if key in content), None)
    if best:
        state["best"] = {"top1": _get_number(content, best, path) / 100}
    if isinstance(content.get("scheduler"), dict):
        state["scheduler"] = content["scheduler"]
    return state


def _get_number(content: dict[str, Any], key: str, path: Path) -> float:
    """Returns the number under `key` in a file's content, or 0. Raises UserError if the value is not a number."""
    value = content.get(key, 0)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if not isinstance(value, int | float) or not 0 <= value <= 1e9:
        shown = shortened(repr(value)) if not isinstance(value, Tensor) else f"a tensor of {value.numel()} numbers"
        raise UserError(f"{key} in {path.name} is {shown}, expected a number", str(path), _AGAIN)
    return value


def _imagenet_optimizer(content: dict[str, Any], path: Path) -> dict[str, Any] | None:
    found = content.get("optimizer")
    if not isinstance(found, dict):
        return None
    groups: Any = found.get("param_groups")
    state: Any = found.get("state")
    right = isinstance(groups, list) and isinstance(state, dict)
    right = right and all(isinstance(each, dict) and isinstance(each.get("params"), list) for each in groups)
    if right:
        numbers = [number for group in groups for number in group["params"]]
        right = all(type(number) is int for number in numbers) and set(state) <= set(numbers)
        right = right and all(isinstance(entries, dict) for entries in state.values())
    if not right:
        raise UserError(f"the optimizer state in {path.name} is not a torch.optim state_dict", str(path), _AGAIN)
    return found


def _step_schedule(saved: Any, epoch: int, group: dict[str, Any]) -> dict[str, Any]:
    """Returns the saved StepLR state. If there is none, returns the state in PyTorch's main.py at this epoch."""
    if isinstance(saved, dict) and {"step_size", "gamma", "last_epoch"} <= set(saved):
        return saved
    rate = float(group["lr"])
    return {
        "step_size": 30,
        "gamma": 0.1,
        "base_lrs": [float(group.get("initial_lr", rate))],
        "last_epoch": epoch,
        "_step_count": epoch + 1,
        "_last_lr": [rate],
    }


def object_names(path: Path) -> list[str]:
    """Returns the classes and functions, except torch's, that a pickle names ("?": computed); [] if not a pickle."""
    with contextlib.suppress(ValueError, OSError, KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        with contextlib.ExitStack() as stack:
            if zipfile.is_zipfile(path):
                archive = stack.enter_context(zipfile.ZipFile(path))
                inner = next((name for name in archive.namelist() if name.endswith("data.pkl")), "")
                content = stack.enter_context(archive.open(inner)).read(_MOST_BYTES)
            else:
                content = stack.enter_context(path.open("rb")).read(_MOST_BYTES)
        return list(dict.fromkeys(name for name in _referenced_names(content) if not _HARMLESS.fullmatch(name)))
    return []


def _referenced_names(content: bytes) -> Iterator[str]:
    """Yields "module.name" of each object that a pickle refers to. Raises ValueError if it is not a pickle."""
    stream = io.BytesIO(content)
    for number in range(5):  # older files of torch begin with a magic number, a version and system information
        if number and stream.read(1) not in (b"\x80", b"(", b"c", b"}"):
            return  # the bytes of the tensors follow
        stream.seek(-1 if number else 0, io.SEEK_CUR)
        words: list[str] = []
        for step, argument, _ in itertools.islice(pickletools.genops(stream), _MOST_STEPS):
            if step.name in {"GLOBAL", "INST"}:
                yield str(argument).replace(" ", ".")
            elif step.name == "STACK_GLOBAL":
                yield ".".join(words[-2:]) or "?"
            elif isinstance(argument, str):
                words.append(argument)
