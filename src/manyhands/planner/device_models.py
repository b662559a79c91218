"""Peak figures of devices that one doesn't sit at, and what of them is assumed to be reached."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs

from manyhands.core.errors import UserError
from manyhands.core.files import parse_toml, read_bytes
from manyhands.core.quantities import parse_memory

# What training of networks for pictures reaches of the peaks, roughly: between what convolutions and products of usual
# sizes reach, and what small ones do.
REACHED_OPERATIONS, REACHED_BANDWIDTH = 0.4, 0.7
_FILE = "device-models.toml"


@dataclass(frozen=True)
class DeviceModel:
    """A device as its maker describes it."""

    name: str  # in full
    memory_bytes: int  # of the device
    bandwidth: float  # bytes per second of its memory
    within: float  # bytes per second to a neighbour in the same machine, in one direction
    operations: Mapping[str, float]  # per second, by precision
    source: str  # of these figures

    def rates(self, precision: str) -> tuple[float, float]:
        """(operations, bytes) per second that are assumed to be reached. Raises UserError: none for this precision."""
        if precision not in self.operations:
            known = ", ".join(self.operations)
            hint = "add " + " or ".join(f"--set train.precision={one}" for one in self.operations)
            raise UserError(f"{self.name} has speeds only for {known}, not {precision}", "--device-model", (hint,))
        return REACHED_OPERATIONS * self.operations[precision], REACHED_BANDWIDTH * self.bandwidth

    def said(self, precision: str) -> str:
        """A sentence on where predictions are from."""
        return (
            f"times are estimated for {self.name}, at {REACHED_OPERATIONS:.0%} of "
            f"{self.operations[precision] / 1e12:.4g} TFLOP/s in {precision} and {REACHED_BANDWIDTH:.0%} of "
            f"{self.bandwidth / 1e9:.4g} GB/s ({self.source})"
        )


def device_models_file() -> Path:
    """Where users add devices."""
    return platformdirs.user_config_path("manyhands") / _FILE


def device_model(name: str) -> DeviceModel:
    """The device of this name, a user's own before ours. Raises UserError: nobody knows it, or it is wrong."""
    ours = resources.files("manyhands.planner").joinpath("device_models.toml")
    known: dict[str, tuple[Any, str]] = {
        key: (value, "device_models.toml") for key, value in parse_toml(ours.read_bytes()).items()
    }
    path = device_models_file()
    try:
        known |= {key.lower(): (value, str(path)) for key, value in parse_toml(read_bytes(path)).items()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}", str(path)) from error
    if name.lower() not in known:
        hints = (f"choose one of: {', '.join(sorted(known))}", f"or add the model to {path}")
        raise UserError(f"no device model is called {name}", "--device-model", hints)
    content, where = known[name.lower()]
    return _read(name.lower(), content, where)


def _read(key: str, content: Any, where: str) -> DeviceModel:
    try:
        operations = {str(one): _positive(rate) for one, rate in content["operations"].items()}
        return DeviceModel(
            str(content["name"]),
            parse_memory(str(content["memory"])),
            _positive(content["bandwidth"]),
            _positive(content["within"]),
            operations,
            str(content["source"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        hints = ("define name, memory, bandwidth, within, operations (by precision) and source",)
        raise UserError(f"the device model {key} is invalid: {error}", f"{where}, {key}", hints) from error


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{value!r} is not a rate")
    return float(value)
