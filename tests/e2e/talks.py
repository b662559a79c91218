"""A network that speaks in each pass, on the process that it is on."""

import itertools
import os
import sys
import time

from torch import nn


class Talks(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
        self.passes = itertools.count()

    def forward(self, images):
        time.sleep(0.01)
        sys.stdout.write(f"pass {next(self.passes)} of {os.environ.get('RANK', 'alone')}\n")
        sys.stdout.flush()
        return super().forward(images)
