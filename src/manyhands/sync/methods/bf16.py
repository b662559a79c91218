"""Averages gradients like allreduce, but sends them as bfloat16: half the bytes, and 8 bits of precision."""

from typing import TYPE_CHECKING

from manyhands.core.needs import AVERAGE_HOOK, WHOLE_GRADIENTS, HasGradients
from manyhands.core.options import Options
from manyhands.sync.costs import Cost, LinkCase, gradient_cost, statistics_cost

if TYPE_CHECKING:
    from manyhands.sync.synchronizer import SyncContext, Synchronizer

EXACT = False
EXCEPTION = "Gradients are rounded to bf16 before they are added up (sync.method = bf16)."
PRECEDENCE = 10
NEEDS = (WHOLE_GRADIENTS, AVERAGE_HOOK)

_ROUNDING = 0.005  # cost of the conversions, as a share of a step


def estimate(case: LinkCase, options: Options) -> list[Cost]:  # noqa: ARG001 - as all methods
    sent, moved = gradient_cost(case, 2), statistics_cost(case)
    computed = case.step_s * (1 + _ROUNDING) if case.machines > 1 else case.step_s
    step_s = computed + case.layers_s + sent.exposed_seconds(case.backward_s) + moved.seconds
    whole = sent + moved
    return [Cost("bf16", step_s, whole.sent_bytes, whole.seconds)]


def make(network: HasGradients, context: "SyncContext", options: Options, cost: Cost) -> "Synchronizer":  # noqa: ARG001 - as all methods
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    from manyhands.sync.synchronizer import Synchronizer

    synchronizer = Synchronizer()
    synchronizer.hook = bf16_compress_hook
    return synchronizer
