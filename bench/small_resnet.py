"""A ResNet small enough to train hundreds of times on two cores; for bench.accuracy."""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, entering, leaving, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(entering, leaving, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(leaving)
        self.conv2 = nn.Conv2d(leaving, leaving, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(leaving)
        self.shortcut = nn.Identity()
        if stride > 1 or entering != leaving:
            conv = nn.Conv2d(entering, leaving, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(leaving))

    def forward(self, x):
        """[N, entering, s, s] to [N, leaving, s / stride, s / stride]."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class SmallResNet(nn.Module):
    """16, 32 and 64 channels, one block each; the first convolution halves the picture."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[N, 3, 32, 32] to [N, classes]."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))
