"""The networks that bench.split splits: some whose weights outweigh their pictures, and one where it is the reverse."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torchvision
from torch import nn

from manyhands.planner.trial import PlanCase


@dataclass(frozen=True)
class Entry:
    """A network to try.

    Attributes:
        about: for the table's head.
        make: the network.
        picture: shape of one sample.
        classes: of the labels.
        batch: samples in an update.
        tail: fully connected layers whose strategies --tail tries out, besides the loss's.
    """

    about: str
    make: Callable[[], nn.Module]
    picture: tuple[int, ...]
    classes: int
    batch: int
    tail: tuple[str, ...] = ()

    def case(self):
        """The updates that are timed; everyone makes the same network."""
        return PlanCase(self._seeded, torch.zeros(self.picture), self.classes, self.batch, _loss_fn)

    def _seeded(self):
        torch.manual_seed(0)
        return self.make().train()


def _loss_fn(output, labels):
    return nn.functional.cross_entropy(output, labels, reduction="sum"), output


def _convolutions():
    """Two of them: 3 x 32 x 32 becomes 1024 features."""
    return [
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    ]


def fully_connected(*widths):
    """Convolutions, then layers of these widths."""
    layers = _convolutions()
    before = 1024
    for width in widths:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers[:-1])


def head(features, classes):
    """A small network with a head of very many classes."""
    return nn.Sequential(*_convolutions(), nn.Linear(1024, features), nn.ReLU(), nn.Linear(features, classes))


def vgg(width):
    """VGG-16 with a head of this width instead of 4096."""
    model = torchvision.models.vgg16()
    model.classifier = _classifier(512 * 7 * 7, width)
    return model


def alexnet(width):
    """AlexNet with a head of this width instead of 4096."""
    model = torchvision.models.alexnet()
    model.classifier = _classifier(256 * 6 * 6, width)
    return model


def _classifier(features, width):
    layers = [nn.Linear(features, width), nn.ReLU(), nn.Dropout(), nn.Linear(width, width), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(width, 1000))


_TAIL = ("7", "9")
_SMALL, _MIDDLE = (3, 32, 32), (3, 64, 64)
ENTRIES = {
    "fc-1000": Entry(
        "2 convolutions, 1024-2048-4096-1000", lambda: fully_connected(2048, 4096, 1000), _SMALL, 1000, 32
    ),
    "fc-4096": Entry(
        "2 convolutions, 1024-2048-4096-4096", lambda: fully_connected(2048, 4096, 4096), _SMALL, 4096, 32
    ),
    "tail-1000": Entry("2 convolutions, 1024-2048-1000", lambda: fully_connected(2048, 1000), _SMALL, 1000, 32, _TAIL),
    "tail-4096": Entry("2 convolutions, 1024-2048-4096", lambda: fully_connected(2048, 4096), _SMALL, 4096, 32, _TAIL),
    "alexnet": Entry("AlexNet, its head of 4096, 64 px", lambda: alexnet(4096), _MIDDLE, 1000, 32),
    "alexnet-1024": Entry("AlexNet, its head narrowed to 1024, 64 px", lambda: alexnet(1024), _MIDDLE, 1000, 32),
    "vgg16-1024": Entry("VGG-16, its head narrowed to 1024, 64 px", lambda: vgg(1024), _MIDDLE, 1000, 32),
    "head": Entry("a head of 128 to 100,000 classes", lambda: head(128, 100_000), _SMALL, 100_000, 64),
    "resnet50": Entry("ResNet-50, 1000 classes, 64 px", torchvision.models.resnet50, _MIDDLE, 1000, 32),
}
