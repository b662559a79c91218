"""Every process sends its gradients in every update and gets the mean: DDP's own reducer, in full precision."""

from manyhands.sync.costs import Case, Cost
from manyhands.sync.messages import gradients, statistics
from manyhands.sync.options import SyncOptions

DESCRIPTION = "the mean of all gradients in every update, in full precision"


def estimate(case: Case, options: SyncOptions) -> list[Cost]:
    """A ring all-reduce, as far as possible beside the backward pass.

    Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
    """
    del options
    sent, moved = gradients(case, case.item_bytes), statistics(case)
    step_s = case.step_s + max(0.0, sent.seconds - case.backward_s) + moved.seconds
    whole = sent + moved
    return [Cost("allreduce", step_s, whole.sent_bytes, whole.seconds)]
