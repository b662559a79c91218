"""Memory and peak speeds of devices that this machine lacks, and the fraction of the speeds that training reaches."""

from importlib import resources
from typing import Annotated, Any

import platformdirs
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from manyhands.core.errors import UserError
from manyhands.core.files import parse_toml, read_bytes
from manyhands.core.quantities import parse_memory

# Approximate fractions of the peaks that training of image classifiers reaches.
REACHED_OPERATIONS, REACHED_BANDWIDTH = 0.4, 0.7
Rate = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class DeviceModel(BaseModel):
    """Memory and peak speeds of an accelerator, as specified by the vendor."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: str  # full name
    memory_bytes: Annotated[int, BeforeValidator(lambda text: parse_memory(str(text)))] = Field(alias="memory")
    bandwidth: Rate  # of its memory, in bytes per second
    within: Rate  # to a neighbor in the same machine, in bytes per second and direction
    operations: dict[str, Rate]  # per second, by precision
    source: str  # source of these figures

    def rates(self, precision: str) -> tuple[float, float]:
        """Returns (operations, memory bytes) per second in training. Raises UserError for an unlisted precision."""
        if precision not in self.operations:
            known = ", ".join(self.operations)
            hint = "add " + " or ".join(f"--set train.precision={one}" for one in self.operations)
            raise UserError(f"{self.name} has speeds only for {known}, not {precision}", "--device-model", (hint,))
        return REACHED_OPERATIONS * self.operations[precision], REACHED_BANDWIDTH * self.bandwidth

    def describe_source(self, precision: str) -> str:
        """Returns a sentence with the device and the speeds from which times are estimated."""
        return (
            f"times are estimated for {self.name}, at {REACHED_OPERATIONS:.0%} of "
            f"{self.operations[precision] / 1e12:.4g} TFLOP/s in {precision} and {REACHED_BANDWIDTH:.0%} of "
            f"{self.bandwidth / 1e9:.4g} GB/s ({self.source})"
        )


def load_device_model(name: str) -> DeviceModel:
    """Returns the device model `name` from the user's file, or a built-in one. Raises UserError: unknown or invalid."""
    ours = resources.files("manyhands.planner").joinpath("device_models.toml")
    known: dict[str, tuple[Any, str]] = {}
    known |= {key: (value, "device_models.toml") for key, value in parse_toml(ours.read_bytes()).items()}
    path = platformdirs.user_config_path("manyhands") / "device-models.toml"
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
    try:
        return DeviceModel.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        what = f"the device model {name.lower()} is invalid: {why}"
        hints = ("define name, memory, bandwidth, within, operations (by precision) and source",)
        raise UserError(what, f"{where}, {name.lower()}", hints) from error
