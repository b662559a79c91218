"""What all contenders have in common: the job's numbers, the network, and the clock."""

import argparse
import json
import sys
import time

PROCESSES = 2
BATCH = 32  # on each process
RATE = 0.001
MEAN, DEVIATION = 0.1307, 0.3081
WARM_UP = 100  # steps before the clock starts


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="folder with MNIST/raw as torchvision lays it")
    parser.add_argument("--steps", type=int, default=2000, help="steps that are timed, after the warm-up")
    # Launchers add arguments of their own.
    return parser.parse_known_args()[0]


def make_network():
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def pictures(folder):
    """MNIST through torchvision, each picture turned into a tensor and normalized when it is asked for."""
    from torchvision import datasets, transforms

    steps = [transforms.ToTensor(), transforms.Normalize((MEAN,), (DEVIATION,))]
    return datasets.MNIST(folder, train=True, transform=transforms.Compose(steps))


class Clock:
    """Counts steps; the time between the warm-up and the last step is what counts."""

    def __init__(self, name, steps):
        self.name, self.last = name, (WARM_UP + steps) if steps else 1
        self.done = 0
        self.first_at = self.started = None

    def step(self):
        """To be called after each step; True when it was the last one."""
        self.done += 1
        if self.done == 1:
            self.first_at = time.time()
        if self.done == WARM_UP:
            self.started = time.perf_counter()
        return self.done >= self.last

    def report(self):
        """Prints the line; for one process to call, right after its last step."""
        line = {"contender": self.name, "first_step_at": self.first_at}
        if self.started is not None:
            seconds = time.perf_counter() - self.started
            line["images_per_s"] = (self.last - WARM_UP) * BATCH * PROCESSES / seconds
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
