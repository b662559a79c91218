"""Gradients as products of two thin matrices in every update; what is left out is added to the next one.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed
optimization", 2019, arXiv:1905.13727.
"""

from manyhands.sync.costs import Case, Cost
from manyhands.sync.messages import Message, low_rank_batches
from manyhands.sync.options import SyncOptions

DESCRIPTION = "gradients of low rank in every update; what is left out is sent later"

# Factors, products and what is held: passes over all values, measured for a ResNet-18 on a CPU.
_PASSES = 5


def estimate(case: Case, options: SyncOptions) -> list[Cost]:
    """Batches leave while the backward pass goes on; BatchNorm's statistics with evaluations and checkpoints only."""
    batches = low_rank_batches(case, options.rank)
    sent = sum(batches, Message())
    # The first batch comes a while after the backward pass has begun, the last one when it is over; compressing one
    # goes on while others are under way.
    before_last = 1 - 1 / len(batches)
    compressing_s = case.compressing_s(_PASSES)
    standing_s = compressing_s - min(case.idle_s, compressing_s) * before_last
    waiting_s = max(batches[-1].seconds, sent.seconds - case.backward_s * before_last - standing_s)
    return [Cost("powersgd", case.step_s + standing_s + waiting_s, sent.sent_bytes, sent.seconds)]
