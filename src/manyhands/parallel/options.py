"""The [parallel] section of a job."""

from pydantic import Field

from manyhands.core.options import Options


class ParallelOptions(Options):
    """Where tensors live."""

    mode: str = Field(default="auto", description="single, data, dataparallel or fsdp; auto: data when there are peers")
