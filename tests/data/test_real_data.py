"""The real MNIST, CIFAR-10 and ImageNet pictures, where they are."""

import torch

from manyhands.data.loading import open_loader
from manyhands.data.open import open_data, resolve_pixels
from manyhands.data.options import DataOptions


def test_mnist(real_data):
    folder = real_data("mnist").parent
    splits = open_data(DataOptions(name="mnist", dir=str(folder), download=False))
    assert (len(splits.train), len(splits.test)) == (60_000, 10_000)
    assert splits.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert splits.test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    pixels = splits.train.images.float() / 255
    assert splits.pixels.mean == (round(float(pixels.mean()), 4),)
    assert splits.pixels.std == (round(float(pixels.std()), 4),)


def test_imagenet(real_data):
    splits = open_data(DataOptions(name=str(real_data("imagenet-sample"))))
    assert (len(splits.train), len(splits.test), len(splits.classes)) == (90, 10, 100)
    pixels = resolve_pixels(DataOptions(image_size=64), splits.pixels)
    for source, train in ((splits.train, True), (splits.test, False)):
        loader = open_loader(source, pixels, train=train, seed=0, workers=1)
        requests = torch.arange(len(source)).split(16)
        images = torch.cat([batch.images for batch in loader.batches(0, requests)])
        loader.close()
        assert images.shape == (len(source), 3, 64, 64)
        assert images.mean().abs() < 0.5
        assert 0.7 < images.std() < 1.5
