"""Which signals ask for a stop, who hears them, and how a launcher watches machines until all have ended."""

import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from manyhands.cluster.agents import heartbeats, protocol
from manyhands.cluster.agents.connection import AgentConnection, close_all
from manyhands.cluster.agents.elastic import _log_tail
from manyhands.cluster.agents.supervise import WatchHooks, _LauncherState, supervise_once
from manyhands.cluster.failures import first_cause
from manyhands.cluster.hosts.inventory import Machine, Rendezvous
from manyhands.cluster.messages import Alive, encode
from manyhands.core.records import Failure
from manyhands.core.stops import STOPS, on_stop, stop_signals_as_ctrl_c
from manyhands.core.timeouts import AWAITED_S, KILL_S, SILENT_S
from tests.e2e.command import finish, running, wait_until


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
    ("said", "told"),
    [
        ({"code": -9}, "rank 1 on n2 was killed by SIGKILL; cleaning up"),
        ({"code": 1, "record": RECORD}, "rank 1 on n2: out of memory; cleaning up"),
        ({"code": 1, "record": RECORD.model_copy(update={"consequence": True})}, None),
        ({"code": 2, "record": RECORD.model_copy(update={"exit_code": 2})}, None),
    ],
)
def test_a_failure_is_said_as_soon_as_its_agent_knows(said, told):
    heard = []
    head = _LauncherState([], WatchHooks(on_warning=heard.append))
    for _ in range(2):
        head._report_exit(protocol.WorkerExited(rank=1, host="n2", **said))
    assert heard == ([told] if told else [])


class Line:
    """The connection to a machine, which remembers what it was sent."""

    here, machine = False, Machine("n2")

    def __init__(self):
        self.sent, self.last_received = [], time.monotonic()

    def send(self, message):
        self.sent.append(message)


@pytest.mark.parametrize("signals", [[0, 1], [1, 1, 2]])
def test_after_another_launcher_has_stopped_the_run_the_next_ctrl_c_ends_it(signals):
    """The user reads that one more Ctrl-C ends it at once; one pressed before the other stop doesn't count for that."""
    line, shown = Line(), []
    head = _LauncherState(
        [line], WatchHooks(on_stop=lambda: shown.append("press Ctrl-C again"), on_warning=shown.append)
    )
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

    class Started:
        _orders = protocol.Orders({}, str(tmp_path), Rendezvous((2,)))
        log_starts = {1: 20}  # noqa: RUF012 - nobody changes it

    words = _log_tail(Started(), 1).splitlines()
    assert len(words) == 8
    assert set(words) == {"now \ufffd"}
    assert _log_tail(Started(), 0) == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stop_at_any_moment_of_the_start_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for tenths in range(1, 40, 9):
        with running("train", "digits", "mlp", "--epochs", "100000", "-n", "2", "--out", f"run{tenths}") as process:
            wait_until(Path(f"run{tenths}", "ranks").exists, process)
            time.sleep(tenths / 10)
            process.send_signal(signal.SIGTERM)
            ended = finish(process)
        assert ended.code in (75, 130), (tenths, ended)


@pytest.mark.slow
def test_dead_machine_is_named_on_a_stop_and_a_second_interrupt_ends_at_once(tmp_path):
    """Neither ssh nor the machine says that it has gone: both ends of the line are a process that never answers."""
    process = subprocess.Popen(["sleep", "300"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    link = AgentConnection(Machine("n2"), process, tmp_path / "log", here=False)
    began, heard = time.monotonic(), []

    def tell(text):
        heard.append((time.monotonic() - began, text))
        os.kill(os.getpid(), signal.SIGINT)

    ticks = iter([lambda: os.kill(os.getpid(), signal.SIGINT)])
    watch = WatchHooks(lambda: next(ticks, lambda: None)(), on_warning=tell)
    ending = supervise_once({link: protocol.Orders({}, str(tmp_path), Rendezvous((2,)))}, watch)
    assert ending.interrupted
    assert list(ending.lost) == ["n2"]
    [(after_s, said)] = heard
    assert said == "waiting for n2 (no response); press Ctrl-C again to stop at once"
    assert AWAITED_S < after_s < SILENT_S
    assert time.monotonic() - began < after_s + KILL_S
    process.kill()
    process.wait()
    close_all([link])


def spoken_by(tmp_path, name, script):
    """A machine that says what a shell has it say."""
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return AgentConnection(Machine(name), process, tmp_path / name, here=False)


def said(tmp_path, *messages):
    """A shell's command for it."""
    path = tmp_path / "said"
    path.write_bytes(b"".join(encode(message, 1) for message in messages))
    return f"cat {path}"


@pytest.mark.slow
def test_a_machine_whose_processes_have_ended_is_assured_of_its_head_while_others_are_waited_for(tmp_path):
    """It is needed for the next start, and would take its head's silence for its end."""
    heard = tmp_path / "heard"
    ended = said(tmp_path, protocol.WorkersStarted(0, [1]), protocol.WorkersEnded(failed={0: -9}, host="n2"))
    links = [spoken_by(tmp_path, "n2", f"{ended}; exec tee {heard}"), spoken_by(tmp_path, "n1", "sleep 4")]
    told = []
    watch = WatchHooks(recovers=True, on_warning=told.append)
    ending = supervise_once(dict.fromkeys(links, protocol.Orders({}, str(tmp_path), Rendezvous((1, 1)))), watch)
    assert told == [f"n1 is lost: {ending.lost['n1']}; cleaning up"]
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
