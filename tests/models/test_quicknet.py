"""What quicknet is before its first update."""

import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.models.architectures.quicknet import QuickNet
from manyhands.models.build import build_model
from manyhands.models.options import ModelOptions


def quicknet(**arguments):
    torch.manual_seed(1)
    return build_model(ModelOptions(name="quicknet", arguments=arguments), channels=3, size=32, num_classes=10)


def test_the_first_layer_whitens_patches_and_has_the_opposites():
    net = quicknet()
    assert isinstance(net, QuickNet)
    smooth = torch.nn.functional.avg_pool2d(
        torch.rand(200, 3, 34, 34, generator=torch.Generator().manual_seed(2)), 3, 1
    )
    pictures = 20 * (smooth - smooth.mean())
    net.look(pictures)
    found = net.whiten(pictures).transpose(0, 1).flatten(1).double()
    covariance = found @ found.T / found.shape[1]
    one = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(
        covariance, torch.cat([torch.cat([one, -one]), torch.cat([-one, one])], 1), atol=0.01, rtol=0
    )
    assert not net.whiten.weight.requires_grad


def test_it_has_the_widths_that_are_asked_for():
    assert quicknet(widths=[8, 16, 24]).head.weight.shape == (10, 24)
    with pytest.raises(UserError, match="three whole numbers"):
        quicknet(widths=[8, 16])
