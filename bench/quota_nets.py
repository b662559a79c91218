"""The networks that bench.plan_quota plans and times; each is named as file.py:object on a command line."""

import torch
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer


class _Features(nn.Module):
    """[N, 3, 64, 64] to as many numbers as a VGG-16's convolutions give."""

    def forward(self, pictures):
        flat = pictures.flatten(1)
        return torch.cat([flat, flat, flat], 1)[:, : 512 * 7 * 7]


def vgg_head(num_classes=1000):
    """The fully connected layers of a VGG-16: 25,088 features, twice 4,096, and the classes."""
    wide = [_Features(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*wide, nn.Linear(4096, num_classes))


def vit_tiny(num_classes=10):
    """A ViT-Tiny for pictures of 32 pixels in patches of 4: 12 layers of width 192 with 3 heads."""
    return VisionTransformer(
        image_size=32, patch_size=4, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=num_classes
    )
