"""The small ResNet, whose file also switches error feedback off: a negative control of bench.accuracy, nothing else."""

import torch
from small_resnet import SmallResNet as SmallResNet

from manyhands.sync.compress import LowRank

_agree = LowRank.average


def _forgetting(self, values, peers):
    averaged, residual = yield from _agree(self, values, peers)
    return averaged, torch.zeros_like(residual)


LowRank.average = _forgetting
