"""What a run says of itself: its speed, its data, and what a user should know of both."""

import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import manyhands
from manyhands.core.records import read_lines
from tests.e2e import nets

pytestmark = pytest.mark.timeout(300)
QUIET = {"quiet": True, "run__report": False, "out": "run"}


def told(kind):
    return [line for line in read_lines(Path("run/events.jsonl")) if line["kind"] == kind]


def tiny(count=40, labels=10):
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(images, torch.arange(count) % labels)


class Unhurried(nets.Net):
    """Takes a fiftieth of a second at each call."""

    def act(self):
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            continue


def test_saves_between_two_records_leave_the_time_of_training_as_it_was():
    manyhands.fit(Unhurried(), tiny(200), epochs=1, batch=20, checkpoint__every="1steps", run__log_every_s=60, **QUIET)
    steps = [line for line in read_lines(Path("run/metrics.jsonl")) if line["kind"] == "step"]
    assert sum(line["samples"] for line in steps) == 180
    for line in steps:
        assert line["samples"] / line["images_per_s"] >= line["samples"] / 20 * 0.02
