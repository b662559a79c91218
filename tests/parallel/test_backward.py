"""Both ways of giving a loss its weight in the global batch: in a run one follows the other."""

import pytest
import torch
from torch import nn

from manyhands.core.world import World
from manyhands.parallel.gradients import EARLY_PASSES, Gradients
from manyhands.parallel.network import ParallelNetwork


def _gradients(passes, loss_dtype, seed):
    """Of a loss of random weight after so many passes, whose weight is a number in one half of the cases."""
    torch.manual_seed(seed)
    network = nn.Linear(7, 5)
    weight = torch.rand(()) / 100
    gradients = Gradients(ParallelNetwork(network, network), World())
    gradients._passes = passes
    loss = network(torch.randn(3, 7)).pow(2).to(loss_dtype).sum()
    gradients.backward_of(loss, weight if seed % 2 else float(weight))
    return [parameter.grad for parameter in network.parameters()]


@pytest.mark.parametrize("loss_dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_early_and_later_passes_give_equal_bits(loss_dtype):
    for seed in range(50):
        early, late = (_gradients(passes, loss_dtype, seed) for passes in (0, EARLY_PASSES))
        assert all(torch.equal(one, other) for one, other in zip(early, late, strict=True))
