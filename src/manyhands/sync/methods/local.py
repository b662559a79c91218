"""Each machine makes some updates alone, then all agree on the mean of their movements, compressed, beside training.

Sources: Stich, "Local SGD converges fast and communicates little", 2018, arXiv:1805.09767; Douillard et al., "DiLoCo",
2023, arXiv:2311.08105, and "Streaming DiLoCo", 2025, arXiv:2501.18512.
"""

import math

import torch

from manyhands.sync.codecs import Plain, codec_named
from manyhands.sync.costs import Case, Cost
from manyhands.sync.messages import Message, low_rank, mean
from manyhands.sync.options import CodecName, SyncOptions

DESCRIPTION = "updates on each machine alone, and every so often the mean of all movements, compressed"

# Those that suit slow links, by how much is to be preferred where they take equally long.
_CONSIDERED: tuple[CodecName, ...] = ("lowrank", "int8", "int4")
# Compressing and adding, as a share of a step; it happens beside training, once in many steps.
_COMPRESSING = 0.02
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
    every = options.every or _fitting(steps_long, case.steps)
    delay = min(every, math.ceil(_LATE * steps_long) if options.delay < 0 else options.delay)
    waiting_s = max(0.0, exchange.seconds - delay * case.step_s) / every
    computed = case.step_s * (1 + _COMPRESSING) if case.machines > 1 else case.step_s
    return Cost("local", computed + waiting_s, exchange.sent_bytes / every, exchange.seconds, codec, every, delay)


def _exchange(case: Case, options: SyncOptions, codec: CodecName) -> Message:
    """The parameters' movement, and BatchNorm's statistics."""
    if codec == "lowrank":
        moved = low_rank(case, options.rank)
    else:
        own = torch.float64 if case.item_bytes == torch.float64.itemsize else torch.float32
        moved = mean(case, case.values, codec_named(codec, own))
    return moved + mean(case, case.buffers, Plain(torch.float32))


def _fitting(steps_long: float, steps: int) -> int:
    """Steps between agreements, so that an exchange of so many steps fits in; fewer where accuracy asks for it."""
    most = max(1, min(_MOST_STEPS, steps // _FEWEST_ROUNDS))
    return min(most, max(_FEWEST_STEPS, math.ceil(_SLACK * steps_long)))
