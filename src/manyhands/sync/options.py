"""The [sync] section of a job."""

from typing import Literal

from pydantic import Field

from manyhands.core.options import Options

CodecName = Literal["none", "bf16", "int8", "int4", "lowrank"]
Codec = Literal["auto", "none", "bf16", "int8", "int4", "lowrank"]


class SyncOptions(Options):
    """When replicas agree and what they send."""

    method: str = Field(default="allreduce", description="auto, allreduce, bf16, powersgd or local")
    codec: Codec = Field(default="auto", description="local: how the exchange is compressed")
    every: int = Field(default=0, ge=0, description="local: steps between agreements; 0 fits them to the link")
    delay: int = Field(
        default=-1, ge=-1, description="local: steps for which an exchange may go on beside training; 0 waits, -1 fits"
    )
    rank: int = Field(default=4, ge=1, le=128, description="powersgd and lowrank: columns kept of each large matrix")
    outer_lr: float = Field(default=1.0, gt=0, le=10, description="local: factor of the agreed movement")
    outer_momentum: float = Field(
        default=0.0, ge=0, lt=1, description="local: Nesterov's momentum of the agreed movements"
    )
    within: Literal["auto", "machine", "process"] = Field(
        default="auto", description="who goes together over the link; auto: the processes of a machine, if several have"
    )
    link: str = Field(default="", description="speed between machines, such as 10mbit; empty measures it")
