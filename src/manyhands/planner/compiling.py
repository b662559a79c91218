"""Whether compiling a network pays back many times within a run, from what was measured of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Compiled code is taken to be so many times as fast at best, and to take so long to make, until that is measured.
AT_BEST, USUAL_S = 1.3, 60.0
# It must be so many times as fast, and save so many times what compiling takes: with as many processes, each of which
# compiles for its own share, it still costs nothing, and a run may start several times.
LEAST_GAIN, MANY = 1.05, 32


@dataclass(frozen=True)
class KindOfCompiler:
    """What is known of all machines of a kind; seconds are 0 where they aren't known."""

    name: str  # of the processor or card
    plain_s: float = 0.0  # of a sample's forward and backward, without compiling
    compiled_s: float = 0.0  # of the same, compiled
    making_s: float = 0.0  # that compiling took
    refused: str = ""  # why the network can't be compiled there

    def as_plain(self) -> dict[str, Any]:
        """As JSON data, of which the constructor makes it again."""
        return asdict(self)


def could_pay(plain_s: float, samples: int) -> bool:
    """Whether it is worth measuring in a run of so many samples, each of `plain_s` seconds."""
    return plain_s * samples * (1 - 1 / AT_BEST) >= MANY * USUAL_S


def choose_compile(kinds: Sequence[KindOfCompiler], samples: int) -> tuple[bool, str]:
    """Whether all machines of a run compile, and a sentence on it where that was measured.

    Each kind of machine must gain, so another kind never makes it likelier.
    """
    refused = [kind.refused for kind in kinds if kind.refused]
    if refused:
        return False, f"train.compile is false: {refused[0]}"
    if not kinds or not all(kind.compiled_s for kind in kinds):
        return False, ""
    gain = min(kind.plain_s / kind.compiled_s for kind in kinds)
    dearest = min(kinds, key=lambda kind: _saved(kind, samples) - MANY * kind.making_s)
    if gain < LEAST_GAIN:
        return False, f"train.compile is false: true is {gain:.2f} times as fast, and only {LEAST_GAIN} pays"
    if _saved(dearest, samples) < MANY * dearest.making_s:
        saves, costs = f"{_saved(dearest, samples):.0f} s of one process", f"{dearest.making_s:.0f} s at each start"
        return False, f"train.compile is false: true would save {saves} in this run, and take {costs}"
    return True, f"train.compile is true: {gain:.2f} times as fast in a short measurement"


def _saved(kind: KindOfCompiler, samples: int) -> float:
    return (kind.plain_s - kind.compiled_s) * samples
