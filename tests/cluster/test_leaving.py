"""How long processes are given to leave, once one of the run has failed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from manyhands.cluster.agents import elastic, heartbeats
from manyhands.cluster.agents.heartbeats import ExitTimer
from manyhands.cluster.agents.protocol import Orders, WorkerCommand, WorkerExited, WorkersStarted
from manyhands.cluster.agents.worker_start import begin_worker
from manyhands.cluster.failures import Ending, first_cause
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.parallel.group.heartbeat import emergency_save_path

WRITES = "import sys, time\nwhile True:\n    open(sys.argv[1], 'wb').write(bytes(100)); time.sleep(0.02)"
SLEEPS = "import time; time.sleep(100)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "saves", "stays"), [(WRITES, True, True), (WRITES, False, False), (SLEEPS, True, False)]
)
def test_who_saves_and_gets_on_with_it_is_waited_for(program, saves, stays, tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "LEAVE_S", 0.1)
    monkeypatch.setattr(heartbeats, "SAVE_QUIET_S", 1.0)
    process = subprocess.Popen([sys.executable, "-c", program, tmp_path / "file"])
    try:
        if saves:
            emergency_save_path(tmp_path, 3).touch()
        those = ExitTimer(tmp_path)
        those.begin()
        until = time.monotonic() + 6
        while (patient := those.has_time({3: process.pid}, 0.0)) and time.monotonic() < until:
            time.sleep(0.05)
        assert patient == stays
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("saves", [False, True])
def test_worker_gets_the_time_for_its_update_and_no_save_lasts_for_ever(saves, tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "LEAVE_S", 0.0)
    if saves:
        monkeypatch.setattr(heartbeats, "SAVE_MOST_S", 0.0)
        emergency_save_path(tmp_path, 0).touch()
    those = ExitTimer(tmp_path)
    those.begin()
    assert those.has_time({0: 1}, 60.0)
    assert not those.has_time({0: 1}, 0.0)


class Head:
    """Commands at times of its own; keeps what is sent."""

    def __init__(self, tick):
        self.tick, self.sent, self.open, self.last_received = tick, [], True, time.monotonic()

    def send(self, message):
        self.sent.append(message)

    def pids(self):
        return next(message.pids for message in self.sent if isinstance(message, WorkersStarted))


def workers_of_the_test(orders, scratch, agent_pid):
    """Rank 1 returns at once, or exits; rank 0 returns once a file is there."""
    rank = int(os.environ["RANK"])
    if rank and "exits" in orders.argument:
        os._exit(0)
    if "waits" in orders.argument:
        begin_worker(orders, scratch, agent_pid)
        time.sleep(100)
    while rank == 0 and not Path(orders.argument["until"]).exists():
        time.sleep(0.02)
    return {"status": "stopped", "rank": rank}


RETURNED = {rank: {"status": "stopped", "rank": rank} for rank in (0, 1)}


def run_with(head, tmp_path, monkeypatch, **more):
    monkeypatch.setattr(elastic, "WORKER", __name__)
    monkeypatch.setattr(sys.modules[__name__], "work", workers_of_the_test, raising=False)
    (tmp_path / "ranks").mkdir()
    argument = {"until": str(tmp_path / "until"), **more}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rendezvous = Rendezvous((2,), 0, "127.0.0.1", listener.getsockname()[1])
        before = {number: signal.getsignal(number) for number in elastic.ASKED}
        orders = Orders(argument, str(tmp_path / "ranks"), rendezvous, "cpu", 1)
        try:
            return elastic.run_workers(orders, head, head.tick, listener)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kills", [False, True])
def test_a_process_that_has_returned_has_done_its_work_whatever_fails_then(kills, tmp_path, monkeypatch):
    """It is killed, which disturbs no other one that saves yet; or another machine fails, and none waits for a poll."""
    ticks = iter(range(1000))

    def tick():
        number = next(ticks)
        if number == 10 and kills:  # by now it has returned, and waits for its agent
            os.kill(head.pids()[1], signal.SIGKILL)
        if number == (30 if kills else 10):
            (tmp_path / "until").touch()
        return [] if kills else [WorkerCommand("leave")]

    head = Head(tick)
    began = time.monotonic()
    ended = run_with(head, tmp_path, monkeypatch)
    assert ended.returned == RETURNED
    assert not ended.failed
    assert not ended.broken
    assert time.monotonic() - began < 30


@pytest.mark.timeout(60)
def test_a_process_that_exits_without_a_result_has_failed_though_its_code_is_0(tmp_path, monkeypatch):
    (tmp_path / "until").touch()
    head = Head(list)
    ended = run_with(head, tmp_path, monkeypatch, exits=True)
    assert ended.failed == {1: 0}
    assert [message.code for message in head.sent if isinstance(message, WorkerExited)] == [0]
    cause = first_cause(Ending(failed=ended.failed, hosts={1: "n1"}))
    assert (cause.what, cause.error) == ("rank 1 ended with exit code 0 without returning a result", "SystemExit")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["_assign_worker_ranks", "_start_workers"])
def test_a_stop_while_the_workers_are_started_reaches_them(when, tmp_path, monkeypatch):
    agent = LocalElasticAgent if when == "_start_workers" else elastic.ElasticAgent
    start = getattr(agent, when)

    def stopped(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*arguments)

    monkeypatch.setattr(agent, when, stopped)
    ended = run_with(Head(list), tmp_path, monkeypatch, waits=True)
    assert set(ended.failed.values()) == {-signal.SIGTERM}
