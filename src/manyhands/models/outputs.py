"""What a network returns in training: its logits, and those of auxiliary heads where it has any."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from manyhands.core.errors import UserError

_ONE_HEAD = 0.4
_MORE_HEADS = 0.3


def main_and_auxiliary(output: Any) -> tuple[Tensor, list[tuple[Tensor, float]]]:
    """Splits a network's output into its logits and the auxiliary ones with their weights in the loss.

    Args:
        output: a Tensor [N, classes], or a tuple or namedtuple of which the first is that and the others are alike;
            None among the others is left out.

    Returns:
        The logits, and (logits [N, classes], weight) of each auxiliary head: 0.3 where there are several (GoogLeNet,
        Szegedy et al. 2014, arXiv:1409.4842, section 5), 0.4 for a single one (as Inception v3 is usually trained).

    Raises:
        UserError: it is something else.
    """
    if isinstance(output, Tensor):
        return output, []
    if isinstance(output, Sequence) and output and all(o is None or isinstance(o, Tensor) for o in output):
        main, *others = output
        heads = [head for head in others if head is not None]
        if main is not None:
            weight = _ONE_HEAD if len(heads) == 1 else _MORE_HEADS
            return main, [(head, weight) for head in heads]
    mend = ("return a tensor [N, classes], or a tuple of such tensors: the logits, then the auxiliary ones",)
    raise UserError(f"the network's forward returns a {type(output).__name__}", "model", mend)
