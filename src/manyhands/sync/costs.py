"""What a sync method costs: seconds and bytes per step, from the link, the network's shapes and the step's time."""

import math
from dataclasses import dataclass
from typing import Literal

from manyhands.sync.link_speeds import LinkSpeed

CodecName = Literal["none", "bf16", "int8", "int4", "lowrank"]

# A sum reads two vectors and writes one; what a core of an ordinary machine moves.
_STREAMS, _MEMORY_BYTES_PER_S = 3, 1e10


@dataclass(frozen=True)
class LinkCase:
    """What decides the costs of agreeing."""

    shapes: tuple[tuple[int, ...], ...]  # of all trainable parameters
    item_bytes: int  # of one of their values
    buffers: int  # values in the network's buffers (BatchNorm's statistics)
    machines: int  # parties that agree over the link
    step_s: float  # one update without any agreement
    backward_s: float  # the part of it in which gradients can be sent already
    link: LinkSpeed  # between two machines
    steps: int  # updates of the whole run
    # one sum of two vectors of all values on this device, in which compressing is counted; 0 estimates it
    pass_s: float = 0.0
    idle_s: float = 0.0  # the part of `backward_s` in which what compresses has nothing else to do
    # what layers send to each other in every update where machines agree in each (BatchNorm's sums)
    layers_s: float = 0.0

    def compressing_s(self, passes: float) -> float:
        """Seconds of an exchange's own work, of so many passes over all values; none where nobody is to agree with."""
        if self.machines == 1:
            return 0.0
        return passes * (self.pass_s or _STREAMS * self.values * self.item_bytes / _MEMORY_BYTES_PER_S)

    @property
    def values(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Cost:
    """One way of agreeing, and what it costs."""

    method: str  # its name
    step_s: float  # one update, agreement included, in the long run
    sent_bytes: float  # by each machine per update
    exchange_s: float = 0.0  # one agreement by itself
    codec: CodecName = "none"  # of `local`
    every: int = 1  # steps between agreements
    delay: int = 0  # steps for which an agreement goes on beside training
    refused: str = ""  # why it is no candidate, though its costs are shown; empty for candidates
