"""The [sync] section of a job."""

from pydantic import Field

from manyhands.core.options import Options


class SyncOptions(Options):
    """When replicas agree and what they send."""

    method: str = Field(default="allreduce", description="how gradients are agreed on")
