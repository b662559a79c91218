"""The rank, an option that methods share which send thin factors of matrices. No torch."""

from pydantic import Field

from manyhands.core.options import Options


class RankOptions(Options):
    """How thin factors are."""

    rank: int = Field(default=4, ge=1, le=128, description="powersgd and lowrank: rank of each approximated matrix")
