"""Chance as a pure function of (seed, epoch, sample, draw): no generator, no state, the same in every process.

The same numbers come out one at a time (`SampleRng`, in worker processes) and for a whole batch (`bits`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.seeds import derive, mix

_FIRST, _SECOND, _GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix_tensor(values: Tensor) -> Tensor:
    """Applies `core.seeds.mix` to each of int64 [n]; 64-bit products wrap as they do there."""
    values = values + _signed(_GOLDEN)
    values = (values ^ _shift(values, 30)) * _signed(_FIRST)
    values = (values ^ _shift(values, 27)) * _signed(_SECOND)
    return values ^ _shift(values, 31)


def augmentation_key(seed: int, epoch: int) -> int:
    """The 63-bit key of one epoch's augmentation."""
    return derive(seed, "augment", epoch)


def sample_states(key: int, samples: Tensor) -> Tensor:
    """Scrambles the samples int64 [n] with an epoch's key; the start of each sample's draws, int64 [n]."""
    return mix_tensor(samples ^ key)


def bits(states: Tensor, draw: int) -> Tensor:
    """The draw's 63 random bits for each sample: int64 [n], never negative."""
    return _shift(mix_tensor(states ^ draw), 1)


def below(drawn: Tensor, limit: int) -> Tensor:
    """Turns 63 bits each into whole numbers 0 … limit - 1 (limit below 2**31)."""
    return ((drawn >> 31) * limit) >> 32


def alternate(seed: int, epoch: int, samples: Tensor) -> Tensor:
    """Which of samples int64 [n] have their turn in an epoch, each in every second one: bool [n]."""
    first = below(bits(sample_states(derive(seed, "alternate"), samples), 0), 2)
    return (first + epoch) % 2 == 1


@dataclass(frozen=True)
class SampleRng:
    """The draws of one sample, in plain Python."""

    key: int  # the epoch's, from `augmentation_key`
    sample: int  # the index in the data set
    turn: bool = False  # whether it has its turn in this epoch, as in `alternate`

    def bits(self, draw: int) -> int:
        return mix(mix(self.key ^ self.sample) ^ draw) >> 1

    def below(self, draw: int, limit: int) -> int:
        """A whole number 0 … limit - 1."""
        return ((self.bits(draw) >> 31) * limit) >> 32

    def uniform(self, draw: int) -> float:
        """A number from 0 up to but not including 1, with 53 bits."""
        return (self.bits(draw) >> 10) * 2.0**-53


def epoch_rng(seed: int, epoch: int, sample: int) -> SampleRng:
    """The draws of one sample in an epoch."""
    first = SampleRng(derive(seed, "alternate"), sample).below(0, 2)
    return SampleRng(augmentation_key(seed, epoch), sample, (first + epoch) % 2 == 1)


def spread(count: int, length: int) -> Tensor:
    """Chooses `count` of `length` samples, evenly and always the same ones.

    They are the first of one fixed permutation (no seed), put back in their own order, so a smaller choice is
    part of every larger one: int64 [min(count, length)].
    """
    order = torch.argsort(mix_tensor(torch.arange(length)), stable=True)
    return order[:count].sort().values


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value & _MASK


def _shift(values: Tensor, places: int) -> Tensor:
    """Shifts right and fills with zeros (torch's >> repeats the sign)."""
    return (values >> places) & ((1 << (64 - places)) - 1)
