"""torchvision's ResNets with the stem that suits small pictures: a 3x3 convolution and no max-pool.

Source: He et al. 2015, arXiv:1512.03385, section 4.2 (the stem); widths and depths stay those of ImageNet's networks.
"""

from typing import Any

from torch import nn

from manyhands.models.interface import ModelNeeds, construct

# On pictures of at most MAX_SIZE pixels, and with PREFIX on any.
NAMES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
PREFIX = "cifar:"
TORCHVISION = True
# Twice the side is four times the work, and photographs of 64 px are recognised with the original stem as well.
MAX_SIZE = 32
DIFFERS = "keeps every pixel (3x3 stem, no max-pool) at about 16 times the cost"
_STEM_WIDTH = 64


def needs(name: str, size: int, arguments: dict[str, Any], pretrained: bool) -> ModelNeeds:  # noqa: ARG001 one shape for all
    note = f"{name} with the CIFAR stem (3x3, no max-pool) because pictures are {size} px"
    return ModelNeeds(notes=[f"{note}; torchvision:{name} is the original"])


def build(name: str, *, channels: int, size: int, num_classes: int, arguments: dict[str, Any]) -> nn.Module:  # noqa: ARG001 one shape for all
    from torchvision import models

    model = construct(getattr(models, name), name, arguments, {"weights": None, "num_classes": num_classes})
    model.conv1 = nn.Conv2d(channels, _STEM_WIDTH, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model
