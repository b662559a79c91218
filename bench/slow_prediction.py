"""What the methods' own formulas say of the steps that bench.slow_links measures."""

import math
import statistics

import torch
from torchvision.models import resnet18

from bench.slow_methods import FORWARD_SHARE, read_spec
from manyhands.core.link_speeds import LinkSpeed
from manyhands.core.plugins import load_choice
from manyhands.sync.choose import choose
from manyhands.sync.costs import LinkCase
from manyhands.sync.method import METHODS
from manyhands.sync.options import SyncOptions

# Of a full Ethernet frame's 1514 bytes, what TCP carries.
CARRIED = 1448 / 1514
LATENCY_S = 1e-3


def predict(records, rate, method):
    """(seconds per step, bytes that a machine sends per step); None where there is no formula or no "alone".

    A step by itself takes what it took without any agreement in the same rounds, and a pass over memory what it took
    then; a link carries what its rate leaves after the frames' headers. On an unlimited link only bytes are predicted.
    """
    alone = [one["seconds"] / one["updates"] for one in records if one["method"] == "alone" and "seconds" in one]
    spec = read_spec(method)
    formulas = None if spec.name == "alone" else load_choice(METHODS, spec.name)
    if not alone or not hasattr(formulas, "estimate"):
        return None
    step_s = statistics.median(alone)
    pass_s = statistics.median([one["pass_s"] for one in records if "pass_s" in one] or [0.0])
    (cost,) = formulas.estimate(_case(rate, records[0], step_s, pass_s), _options(spec))
    return None if rate == "none" else cost.step_s, cost.sent_bytes


def choice(records, rate):
    """What `auto` would take on a link, by the same figures; None where "alone" was not measured."""
    alone = [one["seconds"] / one["updates"] for one in records if one["method"] == "alone" and "seconds" in one]
    passes_s = [one["pass_s"] for one in records if "pass_s" in one]
    if not alone or not passes_s or rate == "none":
        return None
    case = _case(rate, records[0], statistics.median(alone), statistics.median(passes_s))
    return choose(case, SyncOptions()).chosen


def _case(rate, turn, step_s, pass_s):
    with torch.device("meta"):
        network = resnet18(num_classes=1000)
    # While it sleeps instead of computing, the processor can compress.
    slept_s = 0.0 if turn["steps"] == "real" else float(turn["steps"].removesuffix("ms")) / 1e3
    bits_per_s = math.inf if rate == "none" else float(rate.removesuffix("mbit")) * 1e6 * CARRIED
    return LinkCase(
        shapes=tuple(tuple(one.shape) for one in network.parameters()),
        item_bytes=4,
        buffers=0,  # the bench leaves BatchNorm's statistics to each process
        machines=turn["processes"],
        step_s=step_s,
        backward_s=(slept_s or step_s) * (1 - FORWARD_SHARE),
        link=LinkSpeed(bits_per_s / 8, LATENCY_S),
        steps=100_000,
        pass_s=pass_s,
        idle_s=slept_s * (1 - FORWARD_SHARE),
    )


def _options(spec):
    if spec.name != "local":
        return SyncOptions(method=spec.name, rank=spec.rank)
    return SyncOptions(method="local", codec=spec.codec, every=spec.every, delay=spec.delay, rank=spec.rank)
