"""The base of every section of a job: strict, frozen, with a description for each field."""

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Options of one part. Unknown keys are refused; values never change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False,
        coerce_numbers_to_str=True,  # a flag's text may look like a number
    )  # fmt: skip
