"""A user's networks, each with a fault: named on the command line as nets.py:NAME."""

import itertools
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset


def rank():
    """However this process got its place."""
    return dist.get_rank() if dist.is_initialized() else 0


def tiny(count=40, labels=10):
    """A few small pictures of noise."""
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(images, torch.arange(count) % labels)


class Net(nn.Module):
    """Sound."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.LazyLinear(24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, num_classes)
        )
        self.layers(torch.zeros(2, 1, 8, 8))
        self.calls = 0

    def forward(self, images):
        if self.training:
            self.calls += 1
            self.act()
        return self.layers(images)

    def act(self):
        """What goes wrong, at some call."""


class OneNumber(nn.Module):
    """Gives one number for each sample, as the network of MindSpore's tutorial does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64, 128))

    def forward(self, images):
        return torch.matmul(images.flatten(1), self.weight).sum(-1)


class Raises(Net):
    """On rank 1 alone, from its seventh call on."""

    who = 1

    def act(self):
        if rank() == self.who and self.calls > 6:
            self.fail()

    def fail(self):
        raise KeyError("the user's own mistake")


class RaisesOnRank0(Raises):
    """On rank 0 alone."""

    who = 0


class RaisesOnce(Raises):
    """At a call that the environment gives, before the first restart only."""

    def act(self):
        marker = Path(os.environ["FAULT_MARKER"])
        if rank() == 1 and self.calls == int(os.environ["FAULT_CALL"]) and not marker.exists():
            marker.touch()
            self.fail()


class Killed(RaisesOnce):
    """By SIGKILL, once."""

    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Starved(RaisesOnce):
    """Allocates until the kernel kills it, once."""

    def fail(self):
        taken = []
        while True:
            taken.append(bytearray(os.urandom(1 << 20)))


class NotANumber(Net):
    """From rank 1's samples alone."""

    def forward(self, images):
        output = super().forward(images)
        return output * float("nan") if rank() == 1 and self.calls > 6 else output


class Hungry(Net):
    """Has memory for 20 pictures in one pass of training, and for 200 in one of evaluation."""

    def forward(self, images):
        if len(images) > (20 if self.training else 200):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it.")
        return super().forward(images)


def broken():
    """A function that fails."""
    raise RuntimeError("the weights are elsewhere")


class Sleepy(Net):
    """Falls asleep at its tenth call; notes that it does, and that it was asked to stop meanwhile."""

    def act(self):
        if self.calls == 10:
            handler = signal.getsignal(signal.SIGTERM)

            def note(*given):
                handler(*given)
                Path("asked").touch()

            signal.signal(signal.SIGTERM, note)
            Path("asleep").touch()
            end = time.monotonic() + 200
            while time.monotonic() < end:
                time.sleep(0.1)


class SlowToEvaluate(Net):
    """Takes its time over each block of an evaluation, and notes that one has begun."""

    def forward(self, images):
        if not self.training and len(images) == 8 and "FAULT_QUICK" not in os.environ:
            Path("evaluating").touch()
            time.sleep(0.5)
        return super().forward(images)


def wide(num_classes):
    """A head whose weights outweigh all else: 1024 features, and as many classes as the data has."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, num_classes))


class SleepsOnRank1(Net):
    """Rank 1 takes a tenth of a second more."""

    def act(self):
        time.sleep(0.1 * (rank() == 1))


class Talks(nn.Sequential):
    """Speaks in each pass, on the process that it is on."""

    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
        self.passes = itertools.count()

    def forward(self, images):
        time.sleep(0.01)
        print(f"pass {next(self.passes)} of {os.environ.get('RANK', 'alone')}", flush=True)
        return super().forward(images)
