"""Which signals ask for a stop, how machines are watched until all have ended, and how long processes may take to."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from manyhands.cluster.agents import elastic, heartbeats, protocol
from manyhands.cluster.agents.connection import AgentConnection, close_all, log_tail
from manyhands.cluster.agents.heartbeats import ExitTimer
from manyhands.cluster.agents.supervise import WatchHooks, _LauncherState, supervise_once
from manyhands.cluster.agents.worker_start import begin_worker
from manyhands.cluster.failures import Ending, first_cause
from manyhands.cluster.hosts.inventory import Machine, Rendezvous
from manyhands.cluster.messages import Alive, encode
from manyhands.core.records import Failure
from manyhands.core.stops import STOPS, on_stop, stop_signals_as_ctrl_c
from manyhands.core.timeouts import AWAITED_S, SILENT_S
from manyhands.parallel.group.heartbeat import emergency_save_path


def test_each_signal_is_heard_and_what_was_there_before_comes_back():
    heard = []
    before = [signal.getsignal(number) for number in STOPS]
    with on_stop(lambda number, _frame: heard.append(number)):
        for number in STOPS:
            os.kill(os.getpid(), number)
    assert heard == list(STOPS)
    assert {number.name for number in STOPS} >= {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"}
    assert [signal.getsignal(number) for number in STOPS] == before
    with pytest.raises(KeyboardInterrupt), stop_signals_as_ctrl_c():  # where there is nothing to save
        os.kill(os.getpid(), signal.SIGUSR1)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup: the run is to outlive its terminal
    try:
        with stop_signals_as_ctrl_c() as taken:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.SIGHUP not in taken
    finally:
        signal.signal(signal.SIGHUP, hangup)


RECORD = Failure(time=1.0, rank=1, host="n2", pid=1, error="RunError", what="out of memory", where="rank 1")


@pytest.mark.parametrize(
    ("said", "reported"),
    [
        ({"code": -9}, "rank 1 on n2 was killed by SIGKILL; cleaning up"),
        ({"code": 1, "record": RECORD}, "rank 1 on n2: out of memory; cleaning up"),
        ({"code": 1, "record": RECORD.model_copy(update={"consequence": True})}, None),
        ({"code": 2, "record": RECORD.model_copy(update={"exit_code": 2})}, None),
    ],
)
def test_a_failure_is_said_as_soon_as_its_agent_knows(said, reported):
    heard = []
    head = _LauncherState([], WatchHooks(on_warning=heard.append))
    for _ in range(2):
        head._report_exit(protocol.WorkerExited(rank=1, host="n2", **said))
    assert heard == ([reported] if reported else [])


class Line:
    """One end of a connection, which remembers what it was sent."""

    here, machine = False, Machine("n2")

    def __init__(self):
        self.sent, self.last_received = [], time.monotonic()

    def send(self, message):
        self.sent.append(message)


@pytest.mark.parametrize("signals", [[0, 1], [1, 1, 2]])
def test_after_another_launcher_has_stopped_the_run_the_next_ctrl_c_ends_it(signals):
    """The user reads that one more Ctrl-C ends it at once; one pressed before the other stop doesn't count for that."""
    line, shown = Line(), []
    watch = WatchHooks(on_stop=lambda: shown.append("press Ctrl-C again"), on_warning=shown.append)
    head = _LauncherState([line], watch)
    *before, last = signals
    for number, requests in enumerate(before):
        if number == len(before) - 1:
            head._handle_message(line, protocol.HeadReplaced())
        head.forward_stops(requests)
    assert line.sent == [protocol.WorkerCommand("stop")]
    head.forward_stops(last)
    assert line.sent == [protocol.WorkerCommand("stop"), protocol.WorkerCommand("kill")]
    assert head.ending.interrupted == 2
    assert "press Ctrl-C again" in shown


def test_last_words_are_of_this_start(tmp_path):
    (tmp_path / "1.log").write_bytes(b"of an earlier start\n" + b"now \xff\n" * 20)
    words = log_tail(tmp_path / "1.log", 20).splitlines()
    assert len(words) == 8
    assert set(words) == {"now \ufffd"}
    assert log_tail(tmp_path / "0.log", 0) == ""


def spoken_by(tmp_path, name, script):
    """A machine that says what a shell has it say."""
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return AgentConnection(Machine(name), process, tmp_path / name, here=False)


def said(tmp_path, *messages):
    """A shell's command for it."""
    path = tmp_path / "said"
    path.write_bytes(b"".join(encode(message, 1) for message in messages))
    return f"cat {path}"


def test_silent_machine_is_named_on_a_stop_and_its_connection_ends_with_the_second_interrupt(tmp_path):
    """Neither ssh nor the machine says that it has gone: both ends of the line are a process that never answers."""
    heard, link = [], spoken_by(tmp_path, "n2", "exec sleep 300")
    head = _LauncherState([link], WatchHooks(on_warning=heard.append))
    head.forward_stops(1)
    late_s = AWAITED_S + 1
    for asked_s, silent_s, reports in ((0, late_s, 0), (late_s, 0, 0), (late_s, late_s, 1)):
        head._asked_at, link.last_received = time.monotonic() - asked_s, time.monotonic() - silent_s
        head.check_links()
        assert heard == ["waiting for n2 (no response); press Ctrl-C again to stop at once"] * reports
    head.forward_stops(2)
    assert link.process.wait(10) == -signal.SIGKILL
    head.receive_messages(link)
    assert list(head.ending.lost) == ["n2"]


@pytest.mark.slow
def test_a_machine_whose_processes_have_ended_is_assured_of_its_head_while_others_are_waited_for(tmp_path):
    """It is needed for the next start, and would take its head's silence for its end."""
    heard = tmp_path / "heard"
    ended = said(tmp_path, protocol.WorkersStarted(0, [1]), protocol.WorkersEnded(failed={0: -9}, host="n2"))
    links = [spoken_by(tmp_path, "n2", f"{ended}; exec tee {heard}"), spoken_by(tmp_path, "n1", "sleep 4")]
    reported = []
    watch = WatchHooks(recovers=True, on_warning=reported.append)
    ending = supervise_once(dict.fromkeys(links, protocol.Orders({}, str(tmp_path), Rendezvous((1, 1)))), watch)
    assert reported == [f"n1 is lost: {ending.lost['n1']}; cleaning up"]
    assert ending.failed == {0: -9}
    assert list(ending.lost) == ["n1"]
    assert not links[0].closed
    close_all(links)
    assert heard.read_bytes().count(b'"is": "Alive"') > 1


def test_what_came_while_the_head_stood_still_keeps_a_machine_from_being_given_up(tmp_path):
    link = spoken_by(tmp_path, "n2", f"{said(tmp_path, protocol.WorkersStarted(0, [1]))}; exec cat")
    head = _LauncherState([link], WatchHooks())
    while not head._started:
        head.receive_messages(link)
    link.last_received -= SILENT_S + 60  # and the pulse, which comes back, is read by nobody
    link.send(Alive())
    assert select.select([link], [], [], 60)[0]
    head.check_links()
    assert not head.ending.lost
    head.running.clear()
    close_all([link])


def test_a_memory_kill_is_read_from_the_cgroups_counter(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "CGROUPS", tmp_path)
    counter = "low 0\nhigh 0\nmax 7\noom {0}\noom_kill {0}\noom_group_kill 0\n"
    (tmp_path / "memory.events").write_text(counter.format(1))
    (tmp_path / "memory.max").write_text("67108864\n")
    kills = heartbeats.OutOfMemoryKills()
    assert kills.record(1, 42, None) is None
    (tmp_path / "memory.events").write_text(counter.format(3))
    found = [kills.record(rank, 42, None) for rank in (1, 2, 3)]
    assert [one and one.what for one in found] == [
        "rank 1 was killed by the kernel, out of memory (limit 64 MiB)",
        "rank 2 was killed by the kernel, out of memory (limit 64 MiB)",
        None,
    ]
    (tmp_path / "memory.events").unlink()
    assert heartbeats.OutOfMemoryKills().record(1, 42, None) is None


def test_a_machine_that_gave_up_a_launcher_that_was_itself_stopped_is_not_asked_about(tmp_path):
    link = spoken_by(tmp_path, "n2", "exit 0")
    link.process.wait()
    head = _LauncherState([link], WatchHooks())
    head._looked_at -= 60
    head.extend_limits_after_pause()
    head.receive_messages(link)
    cause = first_cause(head.ending)
    assert cause.what == "n2 is lost: the agent timed out while the launcher was suspended for 60 s"
    assert "keep the launcher's computer awake" in cause.hints[0]


WRITES = "import sys, time\nwhile True:\n    open(sys.argv[1], 'wb').write(bytes(100)); time.sleep(0.02)"
SLEEPS = "import time; time.sleep(100)"


@pytest.mark.slow
@pytest.mark.parametrize(("program", "saves", "stays"), [(WRITES, 1, True), (WRITES, 0, False), (SLEEPS, 1, False)])
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


class Head(Line):
    """Commands at times of its own."""

    def __init__(self, tick):
        super().__init__()
        self.tick, self.open = tick, True

    def pids(self):
        return next(message.pids for message in self.sent if isinstance(message, protocol.WorkersStarted))


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


def run_with(head, tmp_path, monkeypatch, **more):
    monkeypatch.setattr(elastic, "WORKER", __name__)
    monkeypatch.setattr(sys.modules[__name__], "work", workers_of_the_test, raising=False)
    (tmp_path / "ranks").mkdir()
    argument = {"until": str(tmp_path / "until"), **more}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rendezvous = Rendezvous((2,), 0, "127.0.0.1", listener.getsockname()[1])
        before = {number: signal.getsignal(number) for number in elastic.ASKED}
        orders = protocol.Orders(argument, str(tmp_path / "ranks"), rendezvous, "cpu", 1)
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
        return [] if kills else [protocol.WorkerCommand("leave")]

    head = Head(tick)
    began = time.monotonic()
    ended = run_with(head, tmp_path, monkeypatch)
    assert ended.returned == {rank: {"status": "stopped", "rank": rank} for rank in (0, 1)}
    assert not ended.failed
    assert not ended.broken
    assert time.monotonic() - began < 30


@pytest.mark.timeout(60)
def test_a_process_that_exits_without_a_result_has_failed_though_its_code_is_0(tmp_path, monkeypatch):
    (tmp_path / "until").touch()
    head = Head(list)
    ended = run_with(head, tmp_path, monkeypatch, exits=True)
    assert ended.failed == {1: 0}
    assert [message.code for message in head.sent if isinstance(message, protocol.WorkerExited)] == [0]
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
    assert set(run_with(Head(list), tmp_path, monkeypatch, waits=True).failed.values()) == {-signal.SIGTERM}
