"""CIFAR-10 of which a part is learned and all the rest judges: a data set for bench.accuracy.

Two networks that are equally good disagree on a fifth of all pictures, so that their difference in top-1 on 10,000
pictures varies by half a point for that alone; on 55,000 by a fifth.
"""

import torch

from manyhands.data.datasets import cifar
from manyhands.data.options import DataOptions
from manyhands.data.random import spread
from manyhands.data.splits import ImagesInMemory, Splits, describe, take


def of_5000():
    """5,000 pictures to learn from, evenly spread; 45,000 others and the test split judge."""
    return _parted(5000)


def of_1600():
    """Likewise 1,600."""
    return _parted(1600)


def _parted(count):
    whole = cifar.open("cifar10", DataOptions())
    learned = spread(count, len(whole.train))
    others = torch.ones(len(whole.train), dtype=torch.bool)
    others[learned] = False
    train, rest = take(whole.train, learned), take(whole.train, others.nonzero().flatten())
    test = ImagesInMemory(torch.cat([rest.images, whole.test.images]), torch.cat([rest.labels, whole.test.labels]))
    return Splits(train, test, whole.classes, describe("CIFAR-10, parted", train, test), whole.pixels)
