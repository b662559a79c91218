"""What a sync method costs: seconds and bytes per step, from the link, the network's shapes and the step's time."""

import math
from dataclasses import dataclass
from typing import Literal

from manyhands.core.link_speeds import LinkSpeed

CodecName = Literal["none", "bf16", "int8", "int4", "lowrank"]

# A sum reads two vectors and writes one; what a core of an ordinary machine moves.
_STREAMS, _MEMORY_BYTES_PER_S = 3, 1e10


@dataclass(frozen=True)
class LinkCase:
    """What decides the costs of agreeing.

    Attributes:
        shapes: of all trainable parameters.
        item_bytes: of one of their values.
        buffers: values in the network's buffers (BatchNorm's statistics).
        machines: parties that agree over the link.
        step_s: one update without any agreement.
        backward_s: the part of it in which gradients can be sent already.
        link: between two machines.
        steps: updates of the whole run.
        pass_s: one sum of two vectors of all values on this device, in which compressing is counted; 0 estimates it.
        idle_s: the part of `backward_s` in which what compresses has nothing else to do.
        layers_s: what layers send to each other in every update where machines agree in each (BatchNorm's sums).
    """

    shapes: tuple[tuple[int, ...], ...]
    item_bytes: int
    buffers: int
    machines: int
    step_s: float
    backward_s: float
    link: LinkSpeed
    steps: int
    pass_s: float = 0.0
    idle_s: float = 0.0
    layers_s: float = 0.0

    def compressing_s(self, passes: float) -> float:
        """Seconds of an exchange's own work, of so many passes over all values; none where nobody is to agree with."""
        if self.machines == 1:
            return 0.0
        return passes * (self.pass_s or _STREAMS * self.values * self.item_bytes / _MEMORY_BYTES_PER_S)

    @property
    def values(self) -> int:
        """In all trainable parameters."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Cost:
    """One way of agreeing, and what it costs.

    Attributes:
        method: its name.
        step_s: one update, agreement included, in the long run.
        sent_bytes: by each machine per update.
        exchange_s: one agreement by itself.
        codec: of `local`.
        every: steps between agreements.
        delay: steps for which an agreement goes on beside training.
        refused: why it is no candidate, though its costs are shown; empty for candidates.
    """

    method: str
    step_s: float
    sent_bytes: float
    exchange_s: float = 0.0
    codec: CodecName = "none"
    every: int = 1
    delay: int = 0
    refused: str = ""
