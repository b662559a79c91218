"""What is watched beside training: a loss that diverges, time spent in communication, connections to end."""

import math
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from torchvision.models import resnet18

from manyhands.core.world import World
from manyhands.sync.costs import LinkCase
from manyhands.sync.link_speeds import parse_link
from manyhands.sync.options import SyncOptions
from manyhands.train.status import CommunicationMonitor, DivergenceDetector, explain_nonfinite, shut_connections


@pytest.mark.parametrize(
    ("classes", "losses", "places"),
    [
        (10, (2.3, 2.0, 1.5, 9.0, 1.4, 8.0, 1.3), []),  # thrown up for once
        (10, (0.01, 0.05, 0.04, 0.06, 0.05), []),  # a run that goes on
        (10, (2.3, 6.8, 6.8, 6.8, 6.8), []),
        (10, (900.0, 1500.0, 2000.0, 2500.0, 2600.0), []),  # a loss of one's own
        (10, (2.3, 8.0, 9.0, 30.0, 40.0, 1e6), [3]),
        (10, (2.3, 8.0, math.inf, 1e30, 40.0), [3]),
        (1000, (6.9, 21.0, 22.0, 23.0), [3]),
    ],
)
def test_what_diverges_is_reported_once_and_what_is_usual_not(classes, losses, places):
    watch = DivergenceDetector(classes)
    assert [place for place, loss in enumerate(losses) if watch.observe(loss)] == places


@pytest.mark.parametrize(("step", "advice"), [(0, "no update was possible"), (1, "reduce train.lr")])
def test_a_loss_lost_before_any_update_is_not_blamed_on_the_learning_rate(step, advice):
    network = SimpleNamespace(traits=SimpleNamespace(nonfinite_buffers=()), model=resnet18())
    measured = SimpleNamespace(bad_loss_step=step, bad_gradient_step=math.inf)
    assert advice in explain_nonfinite(network, World(), measured).hints[0]


SHAPES = tuple(tuple(one.shape) for one in resnet18().parameters())
RUN = SimpleNamespace(job=SimpleNamespace(sync=SyncOptions()), folder=SimpleNamespace(path=Path("runs/a")))


def standing(link):
    return CommunicationMonitor(
        lambda computing_s: LinkCase(SHAPES, 4, 9610, 3, computing_s, 0.0, parse_link(link), 10_000), RUN, {}
    )


def reported(link, stood_s, step_s, steps, processes=3):
    one, said = standing(link), []
    journal = SimpleNamespace(event=lambda kind, text, step, **figures: said.append((kind, text, step, figures)))
    for step in range(1, steps + 1):
        status = SimpleNamespace(extra=[processes * stood_s, processes * step_s, processes])
        one.observe(status, step, journal)
    return said


@pytest.mark.parametrize(
    ("link", "stood_s", "step_s", "at", "words"),
    [
        ("10mbit", 54.0, 55.0, 2, ["98% of the 55 s per step", "powersgd", "resume runs/a --set sync.method=auto"]),
        # Short steps are watched for a while.
        ("100mbit", 0.9, 1.0, 4, ["90% of the 1 s per step", "manyhands resume"]),
        ("100gbit", 0.9, 1.0, 4, ["--sync auto would also choose allreduce"]),
    ],
)
def test_communication_is_reported_once_with_its_share_and_what_auto_would_change(link, stood_s, step_s, at, words):
    ((kind, text, step, figures),) = reported(link, stood_s, step_s, 9)
    assert (kind, step) == ("sync", at)
    assert figures["share"] == pytest.approx(stood_s / step_s)
    assert [word for word in words if word not in text] == []
    assert ("resume" in text) == (link != "100gbit")
    assert reported(link, step_s / 3, step_s, 50) == []  # a third of the time and less goes unsaid


def test_standing_still_is_what_neither_computes_nor_waits_for_data():
    one = standing("10mbit")
    stood_s, all_s, processes = one.numbers_to_sum(10.0, 2, 3.0)
    assert (all_s, processes) == (10.0, 1)
    assert 5.0 < stood_s <= 7.0
    one.compute_s = 2.5
    assert one.numbers_to_sum(10.0, 2, 3.0) == [2.0, 10.0, 1]
    assert one.numbers_to_sum(1.0, 2, 3.0) == [0.0, 1.0, 1]


def test_connections_end_and_listeners_stay_open():
    child = os.fork()
    if not child:
        try:
            os.closerange(3, 4096)  # those of the tests
            listener = socket.create_server(("127.0.0.1", 0))
            near = socket.create_connection(listener.getsockname(), timeout=60)
            far, _ = listener.accept()
            shut_connections()
            heard = near.recv(1) + far.recv(1)  # who waits for another hears nothing
            socket.create_connection(listener.getsockname()).close()
            listener.accept()  # gloo ends the whole process where this fails
            os._exit(len(heard))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
