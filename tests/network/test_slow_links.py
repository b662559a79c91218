"""Slow links: what local steps and compressed gradients send, links that fail, and a process that dies."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

from manyhands.core.choices import load_choice
from manyhands.sync.costs import LinkCase
from manyhands.sync.link_speeds import LinkSpeed
from manyhands.sync.options import METHODS, SyncOptions
from tests.e2e.command import (
    Ended,
    assert_equal_weights,
    assert_one_screen,
    end,
    events,
    final_weights,
    free_port,
    typed,
    wait_until,
)
from tests.fork_server import fork_variables
from tests.network.lab import Lab
from tests.network.runs import steps

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
MACHINES = 3
# Of Ethernet, IPv4, and TCP with timestamps.
HEADER_BYTES = 14 + 20 + 32
# What processes tell each other beside the method, for records and stops; per step, at most.
RECORDS_BYTES = 400
# Each process leaves what it holds at its end.
NETWORK = """
import atexit, os
from safetensors.torch import save_file
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, num_classes)
        )
        atexit.register(self.leave)

    def forward(self, images):
        return self.layers(images)

    def leave(self):
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, os.environ["LEFT"])
"""
SHAPES = ((256, 3072), (256,), (256,), (256,), (10, 256), (10,))
STATISTICS = 2 * 256
# An epoch is 40 updates.
JOB = ["synthetic:960x3x32x32x10", "net.py:Net", "--batch", "24", "--train.evaluate_every", "0"]
# Nothing is measured beforehand, on another network, which would leave its own weights too.
JOB += ["--train.precision", "fp32", "--train.channels_last", "false"]
GRADIENTS = ["--sync", "powersgd"]


def local(codec, every=0):
    """Flags of local steps."""
    return ["--sync", "local", "--sync.codec", codec, *(["--sync.every", every] if every else [])]


both = pytest.mark.parametrize("sync", [local("int4", 24), GRADIENTS], ids=["local", "powersgd"])


@pytest.fixture
def slow_lab():
    with Lab(hosts=MACHINES, rate="10mbit", forks=True) as made:
        yield made


@pytest.fixture
def here(here):
    (here / "net.py").write_text(NETWORK)
    return here


@contextlib.contextmanager
def training(lab, out, *more, job=JOB):
    """The processes of a run on all hosts, that meets by hand; they are ended with the block if they haven't before."""
    init = f"tcp://{lab.address(1)}:{free_port()}"
    command = [sys.executable, "-m", "manyhands", "train", *job, *more, "--out", out, "--init", init]
    processes = [
        lab.exec(
            host, [*command, "--world-size", MACHINES, "--rank", host - 1], text=True,
            env=typed(**fork_variables(), LEFT=f"{out}-{host - 1}.safetensors"),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for host in lab.hosts
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                end(process)


def train(lab, out, *more):
    """A run to its good end."""
    with training(lab, out, *more) as processes:
        assert_well(processes)


def finish(process):
    """Longer than other commands are waited for: what it sends is slow."""
    said = process.communicate(timeout=300)
    return Ended(process.returncode, *said)


def assert_well(processes):
    ended = [finish(process) for process in processes]
    assert [one.code for one in ended] == [0] * MACHINES, "\n".join(one.err for one in ended)


def assert_equal_replicas(out):
    first, *others = [load_file(f"{out}-{rank}.safetensors") for rank in range(MACHINES)]
    for other in others:
        assert_equal_weights(first, other)


def sent_data(lab):
    """Bytes that have left each host, without headers."""
    return [lab.sent_bytes(host) - lab.sent_packets(host) * HEADER_BYTES for host in lab.hosts]


def spread(before, after):
    return [late - early for early, late in zip(before, after, strict=True)]


@pytest.mark.parametrize("sync", [local("int4", 16), local("lowrank", 16), GRADIENTS], ids=["int4", "lowrank", "power"])
def test_what_is_sent_is_what_was_estimated(sync, slow_lab, here):
    """Two runs that differ by some exchanges alone; all else that they say is the same, but for its own few bytes."""
    options = dict(zip((word.removeprefix("--sync").strip(".") for word in sync[::2]), sync[1::2], strict=True))
    options = SyncOptions(method=options.pop(""), **options)
    every, more, sent = 16, 8, []
    for name, rounds in (("short", 2), ("long", 2 + more)):
        before = sent_data(slow_lab)
        steps = ["--train.max_steps", every * rounds, "--checkpoint.every", "never"]
        train(slow_lab, name, *steps, "--train.epochs", 10, *sync)
        sent.append(spread(before, sent_data(slow_lab)))
    case = LinkCase(SHAPES, 4, STATISTICS, MACHINES, 0.05, 0.03, LinkSpeed(1.2e6, 1e-3), 1000)
    (cost,) = load_choice(METHODS, options.method).estimate(case, options)
    steps = every * more
    for host_sent in spread(*sent):
        assert abs(host_sent - cost.sent_bytes * steps) < 0.02 * cost.sent_bytes * steps + RECORDS_BYTES * steps


@both
def test_links_that_fail_for_a_while_do_not_end_a_run(sync, slow_lab, here):
    steps = ["--train.epochs", 1000, "--train.max_steps", 600, *sync]
    with training(slow_lab, "run", *steps) as processes:
        wait_until(lambda: events("run", "first-step"), processes[0])
        wait_until(lambda: _steps_made("run") >= 48, processes[0])
        slow_lab.down(3)
        # The cable is out for so long.
        time.sleep(8)
        slow_lab.up(3)
        slow_lab.rate(2, "1mbit")
        slowed = _steps_made("run")
        wait_until(lambda: _steps_made("run") >= slowed + 48, processes[0])
        slow_lab.rate(2, "10mbit")
        assert_well(processes)
    assert_equal_replicas("run")
    # Eight seconds of no cable, most of which training stood still.
    assert max(event["data"]["seconds"] for event in events("run", "stall")) > 4


def test_by_default_a_line_says_what_agreeing_takes_and_what_to_do(slow_lab, here):
    with training(slow_lab, "run", "--train.epochs", 1000, "--checkpoint.every", "never") as processes:
        wait_until(lambda: events("run", "sync"), processes[0], patience=120)
    (told,) = events("run", "sync")
    assert told["data"]["share"] > 0.8
    assert "--sync auto would take about" in told["message"]
    assert told["message"].endswith("/run --set sync.method=auto")


def test_the_pace_follows_a_link(slow_lab, here):
    """A slower link makes processes agree less often, and a faster one more often; the run itself is never over."""
    steps = ["--train.epochs", 2000, *local("int4"), "--checkpoint.every", "never"]
    # A step long enough that exchanges are far from as rare as they may become, on fast machines too.
    job = ["synthetic:9600x3x32x32x10", "net.py:Net", "--batch", "480", "--train.evaluate_every", "0"]
    with training(slow_lab, "run", *steps, job=job) as processes:
        wait_until(lambda: events("run", "first-step"), processes[0])
        before = _paces("run")[0]
        for rate, sign in (("1mbit", 1), ("100mbit", -1)):
            for host in slow_lab.hosts:
                slow_lab.rate(host, rate)
            changed = lambda sign=sign, before=before: sign * (_paces("run")[-1] - before) > 0  # noqa: E731
            wait_until(changed, processes[0], patience=240)
            before = _paces("run")[-1]


def _paces(out):
    """Steps between agreements, as they were decided and changed."""
    return [event["data"]["every"] for event in events(out, "sync")]


def _steps_made(folder):
    """As far as it is recorded."""
    return max(steps(folder), default=0)


@both
def test_after_a_kill_a_resumed_run_comes_to_the_same_bits(sync, slow_lab, here):
    steps = ["--train.epochs", 1000, "--train.max_steps", 240, *sync]
    steps += ["--checkpoint.every", "60steps"]
    train(slow_lab, "whole", *steps)
    assert_equal_replicas("whole")
    with training(slow_lab, "run", *steps) as processes:
        wait_until(lambda: events("run", "saved"), processes[0])
        processes[2].kill()
        ended = [finish(process) for process in processes]
    assert [one.code for one in ended] == [1, 1, -signal.SIGKILL], "\n".join(one.err for one in ended)
    for one in ended[:2]:
        assert_one_screen(one.err)
    saved = events("run", "saved")[-1]["step"]
    assert 0 < saved < 240
    train(slow_lab, "run", *steps)
    assert [event["step"] for event in events("run", "resumed")] == [saved]
    assert_equal_weights(final_weights("run"), final_weights("whole"))
    assert_equal_replicas("run")
