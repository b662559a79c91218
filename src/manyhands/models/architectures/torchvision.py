"""All classification networks of torchvision, as published."""

import pickle
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from manyhands.core.download import Digest, download
from manyhands.core.errors import UserError
from manyhands.core.files import locked
from manyhands.models.interface import ModelNeeds, construct
from manyhands.models.published import published_names

NAMES = tuple(published_names())
PREFIX = "torchvision:"
TORCHVISION = True
_PUBLISHED_CLASSES = 1000
# Networks with a fixed size, and the argument that sets it; the auxiliary head of inception_v3 requires 299.
_SIZED = {"vit": ("image_size", 224), "maxvit": ("input_size", 224), "inception": ("", 299)}
# Networks whose published minimum is the size of their evaluation; they accept any size.
_ANY_SIZE = ("swin", "efficientnet_v2")
# Networks for which torchvision warns, without the argument init_weights, that its default will change.
_WITH_OPEN_DEFAULT = ("googlenet", "inception_v3")
_DIGEST = re.compile(r"-([0-9a-f]{8,})\.")  # torchvision's file names end in the first digits of the SHA-256


def needs(name: str, size: int, arguments: dict[str, Any], pretrained: bool) -> ModelNeeds:
    """Returns the required channels (3), and the required size if it is fixed or `size` is too small."""
    meta = _published_weights(name).meta
    smallest = max(meta["min_size"])
    argument, fixed = _SIZED.get(name.split("_")[0], ("", 0))
    if fixed:
        if pretrained and argument:
            fixed = smallest
        given = arguments.get(argument, fixed)
        fixed = given if isinstance(given, int) else given[0]
        notes = [] if size == fixed else [f"{name} takes pictures of {fixed} px; pictures are resized to that size"]
        return ModelNeeds(3, fixed, notes)
    if size < smallest and not name.startswith(_ANY_SIZE):
        made_for = max(224, smallest)
        return ModelNeeds(3, made_for, [f"{name} needs at least {smallest} px; pictures are enlarged to {made_for}"])
    return ModelNeeds(3)


def build(name: str, *, channels: int, size: int, num_classes: int, arguments: dict[str, Any]) -> nn.Module:  # noqa: ARG001 one shape for all
    if name in _WITH_OPEN_DEFAULT:
        arguments = {"init_weights": True, **arguments}
    return construct(
        _torchvision_models().get_model_builder(name), name, arguments, {"weights": None, "num_classes": num_classes}
    )


def published_arguments(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns `arguments` and those with which `build` builds the network that `build_pretrained` builds."""
    added: dict[str, Any] = {}
    argument, fixed = _SIZED.get(name.split("_")[0], ("", 0))
    if argument and fixed:
        sides = list(_published_weights(name).meta["min_size"])
        added[argument] = sides if argument == "input_size" else max(sides)
    if name in _WITH_OPEN_DEFAULT:
        added["transform_input"] = True
        if name == "googlenet":
            added["aux_logits"] = False
    return {**added, **arguments}


def build_pretrained(name: str, *, num_classes: int, arguments: dict[str, Any]) -> nn.Module:
    """Builds a network with published weights, with new last layers unless `num_classes` is 1000. Raises UserError."""
    weights = _published_weights(name)
    path = fetch_weights(weights.url)
    try:
        fixed = {"weights": weights, "progress": False}
        model = construct(_torchvision_models().get_model_builder(name), name, arguments, fixed)
    except RuntimeError as error:
        raise UserError(f"{path.name} holds another network's weights", str(path), ("delete the file",)) from error
    if num_classes != _PUBLISHED_CLASSES:
        _replace_imagenet_heads(model, name, num_classes)
    return model


def _published_weights(name: str) -> Any:
    return _torchvision_models().get_model_weights(name)["DEFAULT"]


def _torchvision_models() -> ModuleType:
    from torchvision import models  # takes a second

    return models


def _replace_imagenet_heads(model: nn.Module, name: str, num_classes: int) -> None:
    heads: dict[str, nn.Module] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer.out_features == _PUBLISHED_CLASSES:
            heads[path] = nn.Linear(layer.in_features, num_classes, bias=layer.bias is not None)
        elif isinstance(layer, nn.Conv2d) and layer.out_channels == _PUBLISHED_CLASSES:
            heads[path] = nn.Conv2d(layer.in_channels, num_classes, kernel_size=1)
    if not heads:
        raise UserError(f"{name} has no replaceable last layer", "model.pretrained", ("remove model.pretrained",))
    for path, head in heads.items():
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, head)


def fetch_weights(url: str) -> Path:
    """Returns the path of weights in torch hub's cache, after a download if needed. Raises UserError if that fails."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    hints = (f"download {url}", f"and save the file as {path}", "or remove model.pretrained")
    if not path.is_file():
        with locked(path):
            begin = _DIGEST.search(path.name)
            digest = Digest("sha256", begin[1]) if begin else None
            if not path.is_file() and (problem := download(url, path, digest)):
                raise UserError(f"{path.name} can't be downloaded: {problem}", url, hints)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols that torch itself doesn't write
            torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path.name} is damaged or holds more than weights", str(path), hints) from error
    return path
