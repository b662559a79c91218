"""The base class of all sections of a job: strict, frozen, with a description of each field."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """A section of a job's options. Unknown keys are refused, and values never change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False,
        coerce_numbers_to_str=True,  # a flag's text may look like a number
    )  # fmt: skip


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """Declares an option, whose `meaning` is shown in docs/reference.md."""
    return Field(default=default, description=meaning, **limits)
