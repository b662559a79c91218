"""The base of every section of a job: strict, frozen, with a description for each field."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """Options of one part. Unknown keys are refused; values never change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False,
        coerce_numbers_to_str=True,  # a flag's text may look like a number
    )  # fmt: skip


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """Returns the declaration of an option, whose meaning docs/reference.md shows."""
    return Field(default=default, description=meaning, **limits)
