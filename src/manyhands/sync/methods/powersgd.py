"""Gradients as products of two thin matrices in every update; what is left out is added to the next one.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed
optimization", 2019, arXiv:1905.13727.
"""

from manyhands.sync.costs import Case, Cost
from manyhands.sync.messages import low_rank, statistics
from manyhands.sync.options import SyncOptions

DESCRIPTION = "gradients of low rank in every update; what is left out is sent later"

# Products and orthogonalisation, as a share of a step: more on CPUs and with small batches, less on accelerators.
_COMPRESSING = 0.1


def estimate(case: Case, options: SyncOptions) -> list[Cost]:
    """Left factors, then right ones, after the backward pass."""
    sent = low_rank(case, options.rank) + statistics(case)
    computed = case.step_s * (1 + _COMPRESSING) if case.machines > 1 else case.step_s
    return [Cost("powersgd", computed + sent.seconds, sent.sent_bytes, sent.seconds)]
