"""As allreduce, but gradients travel as bfloat16: half the bytes, with 8 bits of each value's fraction."""

from manyhands.sync.costs import Case, Cost
from manyhands.sync.messages import gradients, statistics
from manyhands.sync.options import SyncOptions

DESCRIPTION = "the mean of all gradients in every update, rounded to bfloat16 on the way"

_VALUE_BYTES = 2
# Rounding there and back, as a share of a step.
_ROUNDING = 0.005


def estimate(case: Case, options: SyncOptions) -> list[Cost]:
    """A ring all-reduce of half the bytes, as far as possible beside the backward pass."""
    del options
    sent, moved = gradients(case, _VALUE_BYTES), statistics(case)
    computed = case.step_s * (1 + _ROUNDING) if case.machines > 1 else case.step_s
    step_s = computed + max(0.0, sent.seconds - case.backward_s) + moved.seconds
    whole = sent + moved
    return [Cost("bf16", step_s, whole.sent_bytes, whole.seconds)]
