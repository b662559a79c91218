"""Random numbers as a pure function of (seed, epoch, sample, draw), for one sample (`SampleRng`) or a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.seeds import derive, mix

_CONSTANTS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15)  # of `core.seeds.mix`
_FIRST, _SECOND, _GOLDEN = (number - (1 << 64) for number in _CONSTANTS)


def mix_tensor(values: Tensor) -> Tensor:
    """Applies `core.seeds.mix` to each value of int64 [n]; products wrap at 64 bits in both functions."""
    values = values + _GOLDEN
    values = (values ^ _shift(values, 30)) * _FIRST
    values = (values ^ _shift(values, 27)) * _SECOND
    return values ^ _shift(values, 31)


def bits(states: Tensor, draw: int) -> Tensor:
    """Returns 63 random bits per sample, int64 [n]; `states` are `mix_tensor(samples ^ key of the epoch)`."""
    return _shift(mix_tensor(states ^ draw), 1)


def below(drawn: Tensor, limit: int) -> Tensor:
    """Converts 63 random bits each to integers from 0 to limit - 1 (limit below 2**31)."""
    return ((drawn >> 31) * limit) >> 32


def alternate(seed: int, epoch: int, samples: Tensor) -> Tensor:
    """Returns bool [n]: True for samples that have their turn in this epoch; each has it in every second epoch."""
    first = below(bits(mix_tensor(samples ^ derive(seed, "alternate")), 0), 2)
    return (first + epoch) % 2 == 1


@dataclass(frozen=True)
class SampleRng:
    """The random numbers of one sample, in plain Python."""

    key: int  # of the epoch
    sample: int  # index in the data set
    turn: bool = False  # True if the sample has its turn in this epoch; see `alternate`

    def bits(self, draw: int) -> int:
        return mix(mix(self.key ^ self.sample) ^ draw) >> 1

    def below(self, draw: int, limit: int) -> int:
        return ((self.bits(draw) >> 31) * limit) >> 32

    def uniform(self, draw: int) -> float:
        return (self.bits(draw) >> 10) * 2.0**-53


def epoch_rng(seed: int, epoch: int, sample: int) -> SampleRng:
    first = SampleRng(derive(seed, "alternate"), sample).below(0, 2)
    return SampleRng(derive(seed, "augment", epoch), sample, (first + epoch) % 2 == 1)


def spread(count: int, length: int) -> Tensor:
    """Returns a fixed choice of samples, sorted int64 [min(count, length)]; a larger choice contains a smaller one."""
    order = torch.argsort(mix_tensor(torch.arange(length)), stable=True)
    return order[:count].sort().values


def _shift(values: Tensor, places: int) -> Tensor:
    return (values >> places) & ((1 << (64 - places)) - 1)
