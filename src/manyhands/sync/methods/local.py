"""Local steps: machines train separately, and average compressed parameter changes every few steps.

Sources: Stich, "Local SGD converges fast and communicates little", 2018, arXiv:1805.09767; Douillard et al., "DiLoCo",
2023, arXiv:2311.08105, and "Streaming DiLoCo", 2025, arXiv:2501.18512.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from manyhands.core.errors import UserError
from manyhands.core.needs import OWN_AVERAGE, OWN_STATISTICS, WHOLE_GRADIENTS, HasGradients
from manyhands.core.options import option
from manyhands.sync.costs import CodecName, Cost, LinkCase, RankOptions, averaging_cost, low_rank_cost, value_bytes

if TYPE_CHECKING:
    from manyhands.sync.local import LocalSteps, Pace
    from manyhands.sync.synchronizer import SyncContext, Synchronizer

EXACT = False
EXCEPTION = "Local steps (sync.method = local): results depend on the number of machines."
EVERY_UPDATE = False
PRECEDENCE = 30
NEEDS = (WHOLE_GRADIENTS, OWN_AVERAGE, OWN_STATISTICS)

_CONSIDERED: tuple[CodecName, ...] = ("lowrank", "int8", "int4")  # in order of preference among equally fast ones
# Compression work in passes over all values (ResNet-18 on a CPU, measured), and its largest share of training.
PASSES = {"lowrank": 18, "int4": 42, "int8": 40, "bf16": 28, "none": 24}
_MOST_COMPRESSING = 0.04
_SLACK, _LATE = 1.3, 1.15  # interval and delay, relative to an exchange's length
_MIN_STEPS = 4
_MOST_STEPS, _MIN_ROUNDS = 256, 60  # beyond these, accuracy was lost in our experiments
# The pace changes only by this factor and more than a step, after this many exchanges; less is noise.
_CHANGE, _TIMES = 1.5, 3


class Options(RankOptions):
    """Options of local steps: interval and compression of exchanges, and the outer optimizer."""

    codec: Literal["auto", "none", "bf16", "int8", "int4", "lowrank"] = option(
        "auto", "compression of exchanged parameter changes; used only with method local"
    )
    every: int = option(0, "updates between exchanges; 0: chosen by network speed; used only with method local", ge=0)
    delay: int = option(
        -1,
        "updates to make during an exchange; 0: wait for it; -1: chosen by network speed; used only with method local",
        ge=-1,
    )
    outer_lr: float = option(
        1.0, "outer learning rate, applied to the averaged parameter changes; used only with method local", gt=0, le=10
    )
    outer_momentum: float = option(
        0.0, "outer Nesterov momentum, applied to averaged parameter changes; used only with method local", ge=0, lt=1
    )


def requested_cost(options: Options) -> Cost | None:
    """Returns the Cost that the options set, or None if the link decides. Raises UserError if `delay` > `every`."""
    if options.delay > options.every > 0:
        hints = (f"use --set sync.delay={options.every} or less",)
        what = f"the delay of {options.delay} steps exceeds the interval of {options.every} steps between exchanges"
        raise UserError(what, "sync.delay", hints)
    if not options.every or options.codec == "auto":
        return None
    delay = options.every if options.delay < 0 else options.delay
    return Cost("local", 0.0, 0.0, codec=options.codec, every=options.every, delay=delay)


def allows_cost(cost: Cost, options: Options) -> bool:
    """Returns True if the options allow the codec, interval and delay of `cost`, from an earlier start of the run."""
    wanted = options.codec in {"auto", cost.codec} and options.every in {0, cost.every}
    return wanted and (options.delay < 0 or min(options.delay, cost.every) == cost.delay)


def estimate(case: LinkCase, options: Options) -> list[Cost]:
    codecs = _CONSIDERED if options.codec == "auto" else (options.codec,)
    return [_codec_cost(case, options, codec) for codec in codecs]


def make(network: HasGradients, context: "SyncContext", options: Options, cost: Cost) -> "Synchronizer":
    """Creates the synchronizer with the codec, interval and delay of `cost`. A collective."""
    import torch

    from manyhands.sync.compress import create_compressor, select_arithmetic
    from manyhands.sync.local import LocalSteps
    from manyhands.sync.measure import pass_seconds
    from manyhands.sync.synchronizer import Buffers, dtype_of, trainable_parameters

    trained = list(trainable_parameters(network).values())
    peers, machine, world, places = context.peers(), context.machine(), context.world, context.machine_ranks
    buffers = Buffers(list(network.buffers()), peers, machine, world.device)
    shapes, kind = [tuple(parameter.shape) for parameter in trained], dtype_of(trained)
    compressor = create_compressor(
        cost.codec, shapes, rank=options.rank, seed=context.seed, device=world.device, dtype=kind
    )
    if context.is_leader:
        select_arithmetic([compressor], peers, torch.zeros(0, dtype=kind, device=world.device))
    weight = len(places.machine) * len(places.leaders) / world.size
    settings = context.settings(cost, trained, options.rank if cost.codec == "lowrank" else 0)
    steps = LocalSteps(trained, buffers, peers, compressor, pace_from_cost(cost, options), weight, machine, settings)
    if not _is_fixed(cost, options):
        values = sum(one.numel() for one in trained)
        compressing_s = context.from_rank_0(PASSES[cost.codec] * pass_seconds(values, world.device))
        steps.adapt = PaceAdapter(steps, cost, options, context.steps, compressing_s)
    return steps


def _is_fixed(cost: Cost, options: Options) -> bool:
    """Returns True if interval and delay stay the same, since the user has set them or training waits for exchanges."""
    return bool(options.every) or not cost.delay


def pace_from_cost(cost: Cost, options: Options) -> "Pace":
    from manyhands.sync.local import Pace

    return Pace(cost.every, cost.delay, options.outer_lr, options.outer_momentum)


def _codec_cost(case: LinkCase, options: Options, codec: CodecName) -> Cost:
    # Only parameters: BatchNorm's statistics are sent at evaluations and checkpoints.
    if codec == "lowrank":
        exchange = low_rank_cost(case, case.shapes, options.rank)
    else:
        exchange = averaging_cost(case, case.values, value_bytes(codec, 8 if case.item_bytes == 8 else 4))
    steps_long = exchange.seconds / case.step_s
    compressing_s = case.compressing_s(PASSES[codec])
    every = options.every or interval_for_exchange(steps_long, case.steps, compressing_s / case.step_s)
    delay = delay_for_exchange(steps_long, every) if options.delay < 0 else min(every, options.delay)
    waiting_s = max(0.0, exchange.seconds - delay * case.step_s) / every
    step_s = case.step_s + compressing_s / every + waiting_s
    return Cost("local", step_s, exchange.sent_bytes / every, exchange.seconds, codec, every, delay)


def delay_for_exchange(steps_long: float, every: int) -> int:
    """Returns the delay for exchanges that last `steps_long` steps: this plus a margin, but at most `every` steps."""
    return min(every, max(1, math.ceil(_LATE * steps_long)))


def interval_for_exchange(steps_long: float, steps: int, compressing: float = 0.0) -> int:
    """Returns the interval in steps between exchanges that last `steps_long` steps, or less if accuracy requires it.

    `steps`: updates of the entire run. `compressing`: compression time of an exchange, in steps.
    """
    most = max(1, min(_MOST_STEPS, steps // _MIN_ROUNDS))
    return min(most, max(_MIN_STEPS, math.ceil(_SLACK * steps_long), math.ceil(compressing / _MOST_COMPRESSING)))


@dataclass
class PaceAdapter:
    """Adapts the interval and delay of local steps to the measured duration of exchanges."""

    steps: "LocalSteps"  # the synchronizer whose pace is adapted
    cost: Cost  # the method with its current pace
    options: Options  # the user's options
    total_steps: int  # updates of the entire run
    compressing_s: float  # compression time of an exchange; equal on all processes, so that they decide equally
    _lengths: list[float] = field(default_factory=list[float], init=False)
    _rounds: int = field(default=0, init=False)

    def __call__(self, speeds_s: Sequence[float], exchanges_s: Sequence[float]) -> Cost | None:
        import statistics  # slow to import, and commands that only read a job need none of it

        step_s, taken_s = max(*speeds_s, 1e-6), [one for one in exchanges_s if one > 0]
        if self.steps.rounds > self._rounds and taken_s:
            self._rounds = self.steps.rounds
            # Each process measures an exchange from its own start, and the last process to start waits for no other.
            # With the times of others, a slow process would make exchanges seem long, and the pace ever longer.
            self._lengths = [*self._lengths[-2:], min(taken_s) / step_s]
        if len(self._lengths) < _TIMES or _is_fixed(self.cost, self.options) or not self.steps.idle:
            return None
        long = statistics.median(self._lengths)
        every = interval_for_exchange(long, self.total_steps, self.compressing_s / step_s)
        delay = delay_for_exchange(long, every) if self.options.delay < 0 else min(every, self.options.delay)
        if not _differs_enough(every, self.cost.every) and not _differs_enough(delay, self.cost.delay):
            return None
        self._lengths.clear()
        self.cost = replace(self.cost, every=every, delay=delay)
        self.steps.pace = pace_from_cost(self.cost, self.options)
        return self.cost


def _differs_enough(wanted: int, now: int) -> bool:
    return abs(wanted - now) > 1 and not now / _CHANGE < wanted < now * _CHANGE
