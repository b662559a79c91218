"""The description of a trained network, stored as network.json in the run folder and in each checkpoint's state."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from manyhands.core.errors import UserError
from manyhands.core.files import parse_json, read_bytes

STATE_KEY, FILE = "trained", "network.json"  # in a checkpoint's state, and in the run folder
VERSION = 1
INITIAL_WEIGHTS, TRAINABLE = "initial weights", "trainable parameters"  # keys of `TrainedNetwork.digests`
_TRAINED_ON: dict[int, "TrainedOn"] = {}  # by id(network): a class may define equality by value


class Preprocessing(BaseModel):
    """The preprocessing that converts an image to a network's input.

    The shorter side is resized to `resize` pixels, the center `size` x `size` is cropped, and each channel (0 to 1) is
    normalized with its mean and standard deviation.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)
    own: bool = Field(default=False, description="the user's data set returned tensors, which were not changed")
    size: int = Field(ge=1, le=1 << 20)
    resize: int = Field(ge=1, le=1 << 21)
    channels: int = Field(ge=1, le=1 << 20)
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @model_validator(mode="after")
    def _check_consistency(self) -> "Preprocessing":
        if not self.own:
            if self.channels not in (1, 3) or not len(self.mean) == len(self.std) == self.channels:
                raise ValueError("mean and std don't match the number of channels")
            if min(self.std) <= 0 or self.resize < self.size:
                raise ValueError("std is not positive, or resize is less than size")
        return self


def record_trained_on(network: Any, pictures: Preprocessing, classes: tuple[str, ...]) -> None:
    """Stores the preprocessing and class names of a network in the memory of this process."""
    if id(network) not in _TRAINED_ON:
        weakref.finalize(network, _TRAINED_ON.pop, id(network))
    _TRAINED_ON[id(network)] = TrainedOn(pictures, classes)


def recorded_trained_on(network: Any) -> "TrainedOn | None":
    """Returns what `record_trained_on` stored for a network, which DDP or torch.compile may wrap now, or None."""
    inner = (network, *(getattr(network, name, None) for name in ("module", "_orig_mod")))
    return next((_TRAINED_ON[id(each)] for each in inner if id(each) in _TRAINED_ON), None)


class TrainedOn(NamedTuple):
    """The preprocessing and class names with which a network was trained in this process."""

    pictures: Preprocessing
    classes: tuple[str, ...]  # a name for each output


class TrainedNetwork(BaseModel):
    """The description of a trained network."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    v: int = Field(default=VERSION)
    name: str = Field(description="a model.name that builds the network for any picture size: torchvision:resnet18 …")
    made_in_python: bool = Field(default=False, description="the network was an object, which can't be built by name")
    arguments: dict[str, Any] = {}
    num_classes: int = Field(ge=1, description="number of outputs, an argument of the network's builder")
    axes: tuple[str, ...] = Field(default=(), description="names of the mesh axes for the builder, in mode hybrid")
    double: bool = Field(default=False, description="the network computes in double precision")
    precision: str = Field(default="", description="training precision, as in train.precision")
    channels_last: bool = Field(default=False, description="training memory format, as in train.channels_last")
    pictures: Preprocessing
    classes: tuple[str, ...] = Field(min_length=1, description="a name for each output")
    code: dict[str, str] = Field(default={}, description="SHA-256 of each code file of the run, such as net.py:Net")
    digests: dict[str, str] = Field(default={}, description="SHA-256 of the data, and of objects passed in Python")
    samples: dict[str, int] = Field(default={}, description="number of samples of each split, by its name")

    def changed_names(self, digests: Mapping[str, str]) -> list[str]:
        """Returns the names of code, objects and data whose recorded digest differs from the one in `digests`."""
        then = {**self.code, **self.digests}
        return [name for name, digest in digests.items() if then.get(name, digest) != digest]


def find_record(checkpoint: Path, state: Mapping[str, Any]) -> TrainedNetwork | None:
    """Returns the description in a checkpoint's `state` or, without one, in the run's network.json; or None."""
    if state.get(STATE_KEY) is not None:
        return parse_record(state[STATE_KEY], str(checkpoint))
    for folder in checkpoint.absolute().parents[:2]:
        file = folder / FILE
        if (folder / "job.toml").is_file() and file.is_file():
            try:
                return parse_record(parse_json(read_bytes(file)), str(file))
            except (OSError, ValueError) as error:
                raise _damaged_error(str(file), str(error)) from error
    return None


def parse_record(content: Any, where: str) -> TrainedNetwork:
    """Parses a network's description. Raises UserError if it is damaged or from a newer manyhands."""
    version = cast(dict[str, Any], content).get("v") if isinstance(content, dict) else None
    if isinstance(version, int) and version > VERSION:
        hints = ("update manyhands",)
        raise UserError("the network description was written by a newer version of manyhands", where, hints)
    try:
        return TrainedNetwork.model_validate(content)
    except ValidationError as error:
        raise _damaged_error(where, str(error.errors()[0]["msg"])) from error


def _damaged_error(where: str, reason: str) -> UserError:
    what = f"the network description can't be read: {reason.splitlines()[0] if reason else 'empty file'}"
    return UserError(what, where, ("use another checkpoint of the run, or a copy of this checkpoint",))
