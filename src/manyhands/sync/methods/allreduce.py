"""Leaves the averaging of gradients to the parallel mode, in every update and in full precision."""

from typing import TYPE_CHECKING

from manyhands.core.needs import HasGradients, Need
from manyhands.core.options import Options
from manyhands.sync.costs import Cost, LinkCase, gradient_cost, statistics_cost

if TYPE_CHECKING:
    from manyhands.sync.synchronizer import SyncContext, Synchronizer

EXACT = True
PRECEDENCE = 0
NEEDS: tuple[Need, ...] = ()


def estimate(case: LinkCase, options: Options) -> list[Cost]:  # noqa: ARG001 - as all methods
    """Estimates a ring all-reduce during backward (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002)."""
    sent, moved = gradient_cost(case, case.item_bytes), statistics_cost(case)
    step_s = case.step_s + case.layers_s + sent.exposed_seconds(case.backward_s) + moved.seconds
    whole = sent + moved
    return [Cost("allreduce", step_s, whole.sent_bytes, whole.seconds)]


def make(network: HasGradients, context: "SyncContext", options: Options, cost: Cost) -> "Synchronizer":  # noqa: ARG001 - as all methods
    from manyhands.sync.synchronizer import Synchronizer

    return Synchronizer()
