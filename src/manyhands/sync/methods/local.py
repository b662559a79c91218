"""Each machine makes some updates alone, then all agree on the mean of their movements, compressed, beside training.

Sources: Stich, "Local SGD converges fast and communicates little", 2018, arXiv:1805.09767; Douillard et al., "DiLoCo",
2023, arXiv:2311.08105, and "Streaming DiLoCo", 2025, arXiv:2501.18512.
"""

import math

import torch

from manyhands.sync.codecs import codec_named
from manyhands.sync.costs import Case, Cost
from manyhands.sync.messages import Message, low_rank, mean
from manyhands.sync.options import CodecName, SyncOptions

DESCRIPTION = "updates on each machine alone, and every so often the mean of all movements, compressed"

# Those that suit slow links, by how much is to be preferred where they take equally long.
_CONSIDERED: tuple[CodecName, ...] = ("lowrank", "int8", "int4")
# Compressing and adding, in passes over all values, measured for a ResNet-18 on a CPU. On a CPU they take turns with
# training, so they should be no more than this share of it.
PASSES = {"lowrank": 18, "int4": 42, "int8": 40, "bf16": 28, "none": 24}
_MOST_COMPRESSING = 0.04
# How much longer than an exchange the steps between two of them take, and those after which its result is used.
_SLACK, _LATE = 1.3, 1.15
_FEWEST_STEPS = 4
# Beyond these, accuracy was lost in our experiments.
_MOST_STEPS, _FEWEST_ROUNDS = 256, 60


def estimate(case: Case, options: SyncOptions) -> list[Cost]:
    """One cost for each codec that is considered, or that of the codec that the options name."""
    codecs = _CONSIDERED if options.codec == "auto" else (options.codec,)
    return [_cost(case, options, codec) for codec in codecs]


def _cost(case: Case, options: SyncOptions, codec: CodecName) -> Cost:
    exchange = _exchange(case, options, codec)
    steps_long = exchange.seconds / case.step_s
    compressing_s = case.compressing_s(PASSES[codec])
    every = options.every or fitting_steps(steps_long, case.steps, compressing_s / case.step_s)
    delay = fitting_delay(steps_long, every) if options.delay < 0 else min(every, options.delay)
    waiting_s = max(0.0, exchange.seconds - delay * case.step_s) / every
    step_s = case.step_s + compressing_s / every + waiting_s
    return Cost("local", step_s, exchange.sent_bytes / every, exchange.seconds, codec, every, delay)


def _exchange(case: Case, options: SyncOptions, codec: CodecName) -> Message:
    """The parameters' movement; BatchNorm's statistics go along with evaluations and checkpoints only."""
    if codec == "lowrank":
        return low_rank(case, options.rank)
    own = torch.float64 if case.item_bytes == torch.float64.itemsize else torch.float32
    return mean(case, case.values, codec_named(codec, own))


def fitting_delay(steps_long: float, every: int) -> int:
    """Steps after which an exchange of so many steps has come to its end, mostly."""
    return min(every, max(1, math.ceil(_LATE * steps_long)))


def fitting_steps(steps_long: float, steps: int, compressing: float = 0.0) -> int:
    """Steps between agreements, so that an exchange of so many steps fits in; fewer where accuracy asks for it.

    Args:
        steps_long: how many steps an exchange takes.
        steps: updates of the whole run.
        compressing: an exchange's own work, in steps.
    """
    most = max(1, min(_MOST_STEPS, steps // _FEWEST_ROUNDS))
    return min(most, max(_FEWEST_STEPS, math.ceil(_SLACK * steps_long), math.ceil(compressing / _MOST_COMPRESSING)))
