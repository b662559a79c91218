"""Selects the precision and memory format of a network from a short measurement."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from manyhands.core.devices import wait_for

EXACT, HALF = "fp32", "bf16"
# How many times as fast bf16 must be for its rounding, and channels_last for the trouble of another layout.
LEAST_GAIN, LEAST_GAIN_OF_LAYOUT = 1.3, 1.05
# Rounds in turns after a first one: so many at least, more within the seconds; none begins after the last of them.
_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_S, _MOST_S = 2, 40, 0.4, 2.0


@dataclass(frozen=True)
class Variant:
    """A precision of the job, in one of two memory formats."""

    precision: str
    channels_last: bool

    def __str__(self) -> str:
        return f"{self.precision} {'channels_last' if self.channels_last else 'contiguous'}"


@dataclass(frozen=True)
class KindOfMachine:
    """The measurements of a kind of machine."""

    name: str  # of the processor or card
    bf16: bool  # it computes that itself
    # of an update's forward and backward, by variant; without those that failed
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    failed: Mapping[str, str] = field(default_factory=dict[str, str])  # by variant, why the network can't run so

    def as_plain(self) -> dict[str, Any]:
        """Returns JSON data for the constructor."""
        return asdict(self)


@dataclass(frozen=True)
class PrecisionRequest:
    """The requested precision and memory format; "auto" must be resolved."""

    precision: str
    channels_last: bool | Literal["auto"]

    def variants(self, *, bf16: bool) -> list[Variant]:
        """Returns the possible variants; `bf16`: all machines support it natively."""
        precisions = [EXACT, *([HALF] if bf16 else [])] if self.precision == "auto" else [self.precision]
        layouts = [False, True] if self.channels_last == "auto" else [self.channels_last]
        return [Variant(precision, layout) for precision in precisions for layout in layouts]


def choose_variant(requested: PrecisionRequest, kinds: Sequence[KindOfMachine]) -> tuple[Variant, list[str]]:
    """Selects the variant for all machines of a run, with a sentence on each automatic option.

    The smallest gain over all kinds of machines counts.
    """

    def gain(before: Variant, after: Variant) -> float:
        """Returns the speedup of one variant over another; 0 if a kind of machine can't run both."""
        seconds = [(kind.seconds.get(str(before), 0.0), kind.seconds.get(str(after), 0.0)) for kind in kinds]
        return min(old / new if old and new else 0.0 for old, new in seconds)

    def layout(precision: str) -> Variant:
        if requested.channels_last != "auto":
            return Variant(precision, requested.channels_last)
        pays = gain(Variant(precision, False), Variant(precision, True)) >= LEAST_GAIN_OF_LAYOUT
        return Variant(precision, pays)

    taken, said = layout(EXACT if requested.precision == "auto" else requested.precision), list[str]()
    if requested.precision == "auto":
        half = layout(HALF)
        gained = gain(taken, half)
        said += _said_of_half(kinds, half, gained)
        taken = half if all(kind.bf16 for kind in kinds) and gained >= LEAST_GAIN else taken
    if requested.channels_last == "auto":
        other = Variant(taken.precision, True)
        said += _said_of_layout(kinds, other, gain(Variant(taken.precision, False), other))
    return taken, said


def _said_of_half(kinds: Sequence[KindOfMachine], half: Variant, gained: float) -> list[str]:
    without = [kind.name for kind in kinds if not kind.bf16]
    if without:
        return [f"train.precision is fp32: {without[0]} has no native bf16"]
    if not gained:
        return [f"train.precision is fp32: {why}" for why in _why_not(kinds, half)]
    if gained >= LEAST_GAIN:
        return [f"train.precision is bf16: {gained:.2f} times as fast as fp32 in a short measurement"]
    return [f"train.precision is fp32: bf16 is {gained:.2f} times as fast, below the threshold of {LEAST_GAIN}"]


def _said_of_layout(kinds: Sequence[KindOfMachine], other: Variant, gained: float) -> list[str]:
    if not gained:
        return [f"train.channels_last is false: {why}" for why in _why_not(kinds, other)]
    if gained >= LEAST_GAIN_OF_LAYOUT:
        return [f"train.channels_last is true: {gained:.2f} times as fast in a short measurement"]
    return [f"train.channels_last is false: the speedup is {gained:.2f}, below {LEAST_GAIN_OF_LAYOUT}"]


def _why_not(kinds: Sequence[KindOfMachine], variant: Variant) -> list[str]:
    """Returns why a variant failed; empty if it wasn't tried, or if all failed, which is reported elsewhere."""
    why = [kind.failed[str(variant)] for kind in kinds if str(variant) in kind.failed and kind.seconds]
    return [f"the benchmark of {variant} failed ({one})" for one in why[:1]]


@dataclass(frozen=True)
class Trial:
    """One variant of a network's update, to be timed."""

    ready: Callable[[], None]  # puts everything in place; isn't timed
    run: Callable[[], torch.Tensor]  # forward and backward; gives the loss []


def time_variants(trials: Mapping[Any, Trial], device: str) -> tuple[dict[str, float], dict[str, str]]:
    """Returns (seconds by variant, errors by variant): the fastest of several rounds in turns, on one thread.

    On a CPU, the processor time of this one thread counts, which depends neither on the number of processes nor on the
    load of the machine.
    """
    clock = time.process_time if torch.device(device).type == "cpu" else time.perf_counter
    seconds, failed, threads = dict[str, float](), dict[str, str](), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for variant, trial in trials.items():
            try:
                first, loss = _timed(trial, device, clock)
                if torch.isfinite(loss):
                    seconds[str(variant)] = first
                else:
                    failed[str(variant)] = "the loss is not finite"
            except Exception as error:  # noqa: BLE001 - whatever a network says of a layout or type it doesn't know
                failed[str(variant)] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        left = [(str(variant), trial) for variant, trial in trials.items() if str(variant) not in failed]
        if min(seconds.values(), default=0.0) > _MOST_S:  # the first pass of all sets things up; later ones count
            left = left[:1]
        for _ in _rounds():
            for name, trial in left:
                taken = _timed(trial, device, clock)[0]
                seconds[name] = min(taken, seconds.get(name, taken))
    finally:
        torch.set_num_threads(threads)
    return seconds, failed


def _rounds() -> Iterable[int]:
    began = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        taken = time.perf_counter() - began
        if number and (taken > _MOST_S or (number >= _LEAST_ROUNDS and taken > _ENOUGH_S)):
            return
        yield number


def _timed(trial: Trial, device: str, clock: Callable[[], float]) -> tuple[float, torch.Tensor]:
    trial.ready()
    wait_for(device)
    started = clock()
    loss = trial.run()
    wait_for(device)
    return clock() - started, loss
