"""torchvision's ResNets with a stem for small pictures: a 3x3 convolution and no max-pool.

Source: He et al. 2015, arXiv:1512.03385, section 4.2 (the stem); widths and depths are those for ImageNet.
"""

from typing import Any

from torch import nn

from manyhands.models.interface import ModelNeeds, construct

# For pictures of at most MAX_SIZE pixels, and for any size with PREFIX.
NAMES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
PREFIX = "cifar:"
TORCHVISION = True
MAX_SIZE = 32  # twice the side costs four times the work, and the original stem recognizes photographs of 64 px, too
DIFFERS = "keeps every pixel (3x3 stem, no max-pool) at about 16 times the cost"
_STEM_WIDTH = 64


def needs(name: str, size: int, arguments: dict[str, Any], pretrained: bool) -> ModelNeeds:  # noqa: ARG001 one shape for all
    note = f"{name} uses the CIFAR stem (3x3, no max-pool) because pictures are {size} px"
    return ModelNeeds(notes=[f"{note}; torchvision:{name} is the original"])


def build(name: str, *, channels: int, size: int, num_classes: int, arguments: dict[str, Any]) -> nn.Module:  # noqa: ARG001 one shape for all
    from torchvision import models

    model = construct(getattr(models, name), name, arguments, {"weights": None, "num_classes": num_classes})
    model.conv1 = nn.Conv2d(channels, _STEM_WIDTH, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model
