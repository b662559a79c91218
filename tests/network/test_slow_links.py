"""Slow links: what local steps and compressed gradients send, and links that fail or change their speed."""

import contextlib
import functools
import time

import pytest

from manyhands.core.choices import load_choice
from manyhands.sync.costs import LinkCase
from manyhands.sync.link_speeds import LinkSpeed
from manyhands.sync.options import METHODS, SyncOptions
from tests.e2e.command import events, free_port, training, typed, wait_until
from tests.fork_server import fork_variables
from tests.network.lab import Lab
from tests.network.runs import steps as steps_of
from tests.network.runs import typed_on

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
MACHINES = 3
# Of Ethernet, IPv4, and TCP with timestamps.
HEADER_BYTES = 14 + 20 + 32
# What processes tell each other beside the method, for records and stops; per step, at most.
RECORDS_BYTES = 400
NETWORK = """
from torch import nn

net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
"""
SHAPES = ((256, 3072), (256,), (256,), (256,), (10, 256), (10,))
STATISTICS = 2 * 256
# An epoch is 40 updates.
JOB = "synthetic:960x3x32x32x10 net.py:net --batch 24 --train.evaluate_every 0"
JOB += " --train.precision fp32 --train.channels_last false"
GRADIENTS, LOCAL = "--sync powersgd", "--sync local --sync.codec"


@pytest.fixture
def slow_lab():
    with Lab(hosts=MACHINES, rate="10mbit", forks=True) as made:
        yield made


@pytest.fixture
def here(here):
    (here / "net.py").write_text(NETWORK)
    return here


@contextlib.contextmanager
def together(lab, out, *more, job=JOB):
    """The processes of a run on all hosts, that meets by hand; they are ended with the block if they haven't before."""
    command = ("train", job, *more, "--out", out, f"--init tcp://{lab.address(1)}:{free_port()}")
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(MACHINES):
            words = (*command, "--world-size", MACHINES, "--rank", rank)
            begin = functools.partial(typed_on, lab, 1 + rank, *words, env=typed(**fork_variables()))
            processes.append(stack.enter_context(training(by=begin)))
        yield processes


def train(lab, out, *more):
    """A run to its good end."""
    with together(lab, out, *more) as processes:
        assert_well(processes)


def assert_well(processes):
    """Waits for them longer than for other commands: what they send is slow."""
    reported = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * MACHINES, "\n".join(reported)


def sent_data(lab):
    """Bytes that have left each host, without headers."""
    return [lab.sent_bytes(host) - lab.sent_packets(host) * HEADER_BYTES for host in lab.hosts]


def spread(before, after):
    return [late - early for early, late in zip(before, after, strict=True)]


@pytest.mark.parametrize("codec", ["int4", "lowrank", None])
def test_what_is_sent_is_what_was_estimated(codec, slow_lab, here):
    """Two runs that differ by some exchanges alone; all else that they say is the same, but for its own few bytes."""
    every, more, sent, sync = 16, 8, [], f"{LOCAL} {codec} --sync.every 16" if codec else GRADIENTS
    options = SyncOptions(method="local", codec=codec, every=16) if codec else SyncOptions(method="powersgd")
    for name, rounds in (("short", 2), ("long", 2 + more)):
        before = sent_data(slow_lab)
        train(slow_lab, name, f"--train.max_steps {every * rounds} --checkpoint.every never --train.epochs 10", sync)
        sent.append(spread(before, sent_data(slow_lab)))
    case = LinkCase(SHAPES, 4, STATISTICS, MACHINES, 0.05, 0.03, LinkSpeed(1.2e6, 1e-3), 1000)
    (cost,) = load_choice(METHODS, options.method).estimate(case, options)
    steps = every * more
    for host_sent in spread(*sent):
        assert abs(host_sent - cost.sent_bytes * steps) < 0.02 * cost.sent_bytes * steps + RECORDS_BYTES * steps


@pytest.mark.parametrize("sync", [f"{LOCAL} int4 --sync.every 24", GRADIENTS], ids=["local", "powersgd"])
def test_links_that_fail_for_a_while_do_not_end_a_run(sync, slow_lab, here):
    # At last and in between, all replicas are compared.
    often = "--train.epochs 1000 --train.max_steps 600 --train.audit_every 100"
    with together(slow_lab, "run", often, sync) as processes:
        wait_until(lambda: _steps_made() >= 48, processes[0])
        slow_lab.down(3)
        # The cable is out for so long.
        time.sleep(8)
        slow_lab.up(3)
        slow_lab.rate(2, "1mbit")
        slowed = _steps_made()
        wait_until(lambda: _steps_made() >= slowed + 48, processes[0])
        slow_lab.rate(2, "10mbit")
        assert_well(processes)
    # Eight seconds of no cable, most of which training stood still.
    assert max(event["data"]["seconds"] for event in events("run", "stall")) > 4


def test_the_pace_follows_a_link(slow_lab, here):
    """A slower link makes processes agree less often, and a faster one more often; the run itself is never over."""
    steps = f"--train.epochs 2000 {LOCAL} int4 --checkpoint.every never"
    # A step long enough that exchanges are far from as rare as they may become, on fast machines too.
    job = "synthetic:9600x3x32x32x10 net.py:net --batch 480 --train.evaluate_every 0"
    with together(slow_lab, "run", steps, job=job) as processes:
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


def _steps_made():
    """As far as it is recorded."""
    return max(steps_of(), default=0)
