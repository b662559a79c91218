"""Gradients of low rank: every process sends thin factors of its gradients in every update, and gets their mean."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhands.sync.compress import LowRank
from manyhands.sync.talk import Peers, settle
from manyhands.sync.vector import as_vector, dtype_of, write_vector


class PowerSgd:
    """Agrees on gradients after each backward pass; what the factors lack is sent with the next gradients.

    Not torch's own hook: with several buckets that starts collectives in an order that differs between processes.
    Source: Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727.

    Args:
        parameters: all that are trained, in an order that is equal everywhere.
        peers: who agrees.
        rank: columns of the factors.
        seed: equal everywhere.
        rare: those of them that may get a gradient on no process.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        peers: Peers,
        rank: int,
        seed: int,
        rare: Sequence[nn.Parameter] = (),
    ) -> None:
        self._parameters, self._peers, self._rare = list(parameters), peers, list(rare)
        self._dtype = dtype_of(self._parameters)
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        device = str(self._parameters[0].device)
        self._compressor = LowRank(shapes, rank, seed, device, self._dtype)
        self._held = torch.zeros(sum(one.numel() for one in self._parameters), dtype=self._dtype, device=device)

    def agree(self) -> None:
        """Replaces the gradients by the agreed mean; a collective."""
        gradients = [self._gradient(parameter) for parameter in self._parameters]
        values = as_vector(gradients, self._dtype) + self._held
        mean, self._held = settle(self._compressor.agree(values, self._peers))
        write_vector(mean, gradients)
        for parameter in self._rare:
            # The optimizer leaves alone what has no gradient; the mean is the same everywhere, so all do likewise.
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """What is held back, and the factors."""
        return {"held": self._held, **{f"compressor.{name}": t for name, t in self._compressor.state().items()}}

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes back what `state` gave."""
        self._held = state["held"].to(self._held.device)
        prefix = "compressor."
        factors = {name[len(prefix) :]: t.to(self._held.device) for name, t in state.items() if name.startswith(prefix)}
        self._compressor.load(factors)

    @staticmethod
    def _gradient(parameter: nn.Parameter) -> Tensor:
        """The gradient; zeros for a parameter that this process did not use."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad
