"""What a network returns in training, and what it may take from training pictures before its first update."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from manyhands.core.errors import UserError

_ONE_HEAD = 0.4
_MORE_HEADS = 0.3


def main_and_auxiliary(output: Any) -> tuple[Tensor, list[tuple[Tensor, float]]]:
    """A network's logits, and those [N, classes] of auxiliary heads, each with its weight in the loss.

    They come as a Tensor [N, classes], or as a tuple or namedtuple of which the first is that and the others have its
    shape; None among the others is left out. The weight is 0.3 where there are several heads (GoogLeNet, Szegedy et al.
    2014, arXiv:1409.4842, section 5), 0.4 for a single one (as Inception v3 is usually trained). Raises UserError: it
    is something else.
    """
    if isinstance(output, Tensor) and output.ndim == 2:
        return output, []
    main, *others = output if isinstance(output, Sequence) and output else [output]
    others = [head for head in others if head is not None]
    if isinstance(main, Tensor) and main.ndim == 2:
        heads = [head for head in others if isinstance(head, Tensor) and head.shape == main.shape]
        if len(heads) == len(others):
            weight = _ONE_HEAD if len(heads) == 1 else _MORE_HEADS
            return main, [(head, weight) for head in heads]
    hints = (
        "return a tensor [N, classes]: one row for each picture",
        "or a tuple of such tensors, all of one shape: the logits, then those of auxiliary heads",
    )
    raise UserError(f"the network's forward returns {_shown(output)}", "model", hints)


def _shown(output: Any) -> str:
    """What a network returned, in words: types, and shapes of tensors."""
    if isinstance(output, Tensor):
        return f"a tensor {list(output.shape)}"
    if isinstance(output, Sequence) and not isinstance(output, str) and output:
        return f"a {type(output).__name__} of {', '.join(map(_shown, output))}"
    if isinstance(output, Mapping) and output:
        return f"a {type(output).__name__} of {', '.join(f'{key}: {_shown(value)}' for key, value in output.items())}"
    return "nothing" if output is None else f"a {type(output).__name__}"


# So many small pictures have a million patches.
INITIALIZATION_SAMPLES = 1_000


class InitializedFromData(nn.Module):
    """A network that is shown pictures before it is trained; one that begins with saved weights isn't."""

    def look(self, pictures: Tensor) -> None:
        """Is shown normalised training pictures [n, C, S, S], unvaried, the same at any number of processes."""
        raise NotImplementedError
