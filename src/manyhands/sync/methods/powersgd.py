"""Gradients as products of two thin matrices in every update; what is left out is added to the next one.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed
optimization", 2019, arXiv:1905.13727.
"""

from manyhands.sync.costs import Case, Cost
from manyhands.sync.messages import low_rank, statistics
from manyhands.sync.options import SyncOptions

DESCRIPTION = "gradients of low rank in every update; what is left out is sent later"

# Products, orthogonalisation and what is held: passes over all values, measured for a ResNet-18 on a CPU.
_PASSES = 17


def estimate(case: Case, options: SyncOptions) -> list[Cost]:
    """Left factors, then right ones, after the backward pass."""
    sent = low_rank(case, options.rank) + statistics(case)
    return [Cost("powersgd", case.step_s + case.compressing_s(_PASSES) + sent.seconds, sent.sent_bytes, sent.seconds)]
