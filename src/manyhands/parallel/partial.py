"""Layers whose outputs are terms of a sum over processes."""

from typing import Generic, TypeVar

from torch import Tensor, nn

Layer = TypeVar("Layer", bound=nn.Module)


class PartialLayer(nn.Module, Generic[Layer]):
    """A layer of which this process has a part; its outputs are summed, so the first process alone adds the bias.

    The layer, whose parameters are this process's pieces, is not registered anew: it stays where the user has it.
    """

    def __init__(self, layer: Layer, first: bool) -> None:
        super().__init__()
        self._layer = (layer,)
        # Not left out but multiplied, so that gradients come in the same order on all processes.
        self._share = 1.0 if first else 0.0

    @property
    def layer(self) -> Layer:
        return self._layer[0]

    def own(self, bias: Tensor | None) -> Tensor | None:
        """The bias [out] on the first process, zeros on the others."""
        return None if bias is None else bias * self._share
