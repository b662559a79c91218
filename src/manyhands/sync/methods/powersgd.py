"""Averages low-rank factors of the gradients in every update. The residual is added to the next gradients.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed optimization",
2019, arXiv:1905.13727.
"""

from typing import TYPE_CHECKING

from manyhands.core.needs import FINITE_GRADIENTS, OWN_AVERAGE, OWN_STATISTICS, WHOLE_GRADIENTS, HasGradients
from manyhands.sync.costs import Cost, LinkCase, MessageCost, RankOptions, divide_into_batches, low_rank_cost

if TYPE_CHECKING:
    from manyhands.sync.synchronizer import SyncContext, Synchronizer

EXACT = False
EXCEPTION = "Compressed gradients (sync.method = powersgd): results depend on the number of processes or machines."
PRECEDENCE = 20
NEEDS = (WHOLE_GRADIENTS, OWN_AVERAGE, FINITE_GRADIENTS, OWN_STATISTICS)

_PASSES = 5  # passes over all values, measured for a ResNet-18 on a CPU


class Options(RankOptions):
    """Options of PowerSGD: the rank of the factors."""


def estimate(case: LinkCase, options: Options) -> list[Cost]:
    """Estimates the cost of sending gradients. BatchNorm statistics are sent only at evaluations and checkpoints."""
    places = divide_into_batches(case.shapes, options.rank)  # of which each is sent during the backward pass
    batches = [low_rank_cost(case, [case.shapes[place] for place in batch], options.rank) for batch in places]
    sent = sum(batches, MessageCost())
    # The first batch is complete some time after backward begins, the last at its end; compression overlaps sending.
    before_last = 1 - 1 / len(batches)
    compressing_s = case.compressing_s(_PASSES)
    standing_s = compressing_s - min(case.idle_s, compressing_s) * before_last
    waiting_s = max(batches[-1].seconds, sent.seconds - case.backward_s * before_last - standing_s)
    return [Cost("powersgd", case.step_s + standing_s + waiting_s, sent.sent_bytes, sent.seconds)]


def make(network: HasGradients, context: "SyncContext", options: Options, cost: Cost) -> "Synchronizer":
    from manyhands.sync.powersgd import PowerSgd
    from manyhands.sync.synchronizer import Buffers, trainable_parameters

    named, peers, machine, world = trainable_parameters(network), context.peers(), context.machine(), context.world
    buffers = Buffers(list(network.buffers()), peers, machine, world.device)
    rare, trained = [named[name] for name in context.unused], list(named.values())
    settings = context.settings(cost, trained, options.rank)
    return PowerSgd(
        trained, peers, options.rank, context.seed, rare,
        machine=machine, processes=world.size, buffers=buffers, settings=settings,
    )  # fmt: skip
