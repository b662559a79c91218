"""The law of every architecture: [N, num_classes] comes out, and gradients reach every trainable parameter."""

import pytest
import torch
from torch import nn

from manyhands.models.build import build_model, picture_needs
from manyhands.models.interface import main_and_auxiliary
from manyhands.models.options import ModelOptions

CLASSES = 7
OWN = [
    *[("mlp", channels, size) for channels in (1, 3) for size in (8, 28)],
    *[("cnn", channels, size) for channels in (1, 3) for size in (8, 9, 15, 28, 65)],
    *[("quicknet", channels, size) for channels in (1, 3) for size in (9, 28, 32)],
    *[("resnet18", channels, 32) for channels in (1, 3)],
]
SMALL_ZOO = [(name, 3, 64) for name in ("squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5", "googlenet")]


def build(name: str, channels: int, size: int) -> nn.Module:
    torch.manual_seed(1)
    return build_model(ModelOptions(name=name), channels=channels, size=size, num_classes=CLASSES)


def check_law(model: nn.Module, channels: int, size: int, kind: torch.dtype = torch.float32) -> None:
    pictures = torch.rand(2, channels, size, size, dtype=kind)
    main, heads = main_and_auxiliary(model.train()(pictures))
    for logits in (main, *(head for head, _ in heads)):
        assert logits.shape == (2, CLASSES)
        assert logits.dtype == kind
    (main.square().sum() + sum(weight * head.square().sum() for head, weight in heads)).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    with torch.no_grad():
        assert model.eval()(pictures).shape == (2, CLASSES)


@pytest.mark.parametrize(
    ("name", "channels", "size", "kind"),
    [
        *[(*each, torch.float64 if each[1] == 3 else torch.float32) for each in OWN],
        *[(*each, torch.float32) for each in SMALL_ZOO],
    ],
)
def test_own_architectures_and_small_networks_of_the_zoo(name: str, channels: int, size: int, kind: torch.dtype):
    check_law(build(name, channels, size).to(kind), channels, size, kind)


# One of torchvision's networks for each smallest size or structure; the others differ from these in depth and width.
ZOO = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18",
    "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t",
    "vgg11", "vgg11_bn", "vit_b_16", "vit_b_32", "vit_h_14",
]  # fmt: skip
FEW = {"vit_b_16", "alexnet", "inception_v3", "swin_t", "regnet_y_400mf", "vgg11"}


@pytest.mark.parametrize("name", ["resnet34", "resnet50", "resnet101", "resnet152"])
def test_the_deeper_cifar_resnets(meta, name: str):
    check_law(build(name, 3, 32), 3, 32)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in ZOO])
def test_what_is_said_to_be_the_smallest_size_runs(meta, name: str):
    sizes = (8, 16, 32, 48, 64, 224, 299)
    size = next(one for one in sizes if picture_needs(ModelOptions(name=name), one).size in (None, one))
    check_law(build(name, 3, size), 3, size)
