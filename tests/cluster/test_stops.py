"""Which signals ask for a stop, who hears them, and what is said of what was saved."""

import json
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from manyhands.checkpoint.folders import kept_step, saved_step
from manyhands.cluster.agents import heartbeats
from manyhands.cluster.agents.connection import AgentConnection, close_all
from manyhands.cluster.agents.elastic import _last_words
from manyhands.cluster.agents.protocol import (
    HeadReplaced,
    Orders,
    WorkerCommand,
    WorkerExited,
    WorkersEnded,
    WorkersStarted,
)
from manyhands.cluster.agents.supervise import Watch, _Head, supervise_once
from manyhands.cluster.failures import Ending, first_cause
from manyhands.cluster.hosts.inventory import Machine, Rendezvous
from manyhands.cluster.messages import Alive, encode
from manyhands.config.load import load_job
from manyhands.core.errors import ManyhandsError, RunError
from manyhands.core.records import REPLACED, Event, Failure, Running, append, read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.core.stops import STOPS, ended_like_ctrl_c, handled
from manyhands.core.timeouts import AWAITED_S, KILL_S, SILENT_S
from manyhands.report.read import read_run
from manyhands.run.outcome import conclude, ends_noted, explained, failure_of, interrupted, note, starts_and_stops
from tests.e2e.command import finish, running, wait_until


def test_what_nohup_has_set_stays():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled(lambda *_: None) as taken:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.SIGHUP not in taken
    finally:
        signal.signal(signal.SIGHUP, before)


def test_each_signal_is_heard_and_what_was_there_before_comes_back():
    heard = []
    before = [signal.getsignal(number) for number in STOPS]
    with handled(lambda number, _frame: heard.append(number)):
        for number in STOPS:
            os.kill(os.getpid(), number)
    assert heard == list(STOPS)
    assert {number.name for number in STOPS} >= {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"}
    assert [signal.getsignal(number) for number in STOPS] == before


def test_a_schedulers_word_ends_what_has_nothing_to_save_as_ctrl_c_does():
    with pytest.raises(KeyboardInterrupt), ended_like_ctrl_c():
        os.kill(os.getpid(), signal.SIGUSR1)


def record(**more):
    given = {"time": 1.0, "rank": 1, "what": "out of memory", "where": "rank 1", **more}
    return Failure(host="n2", pid=1, error="RunError", **given)


def test_every_failure_of_a_run_that_has_saved_says_how_to_go_on(tmp_path):
    folder = RunFolder(tmp_path)
    ending = Ending(failed={1: 1}, records={1: record()})
    assert "resume" not in str(failure_of(folder, ending))
    (folder.checkpoints / "step-00000050").mkdir(parents=True)
    assert "resume from the last checkpoint, of step 50" in str(failure_of(folder, ending))
    told = Ending(failed={1: 1}, records={1: record(hints=["make room, then manyhands resume x"])})
    assert str(failure_of(folder, told)).count("manyhands resume") == 1


def test_an_error_that_all_processes_raise_is_of_the_rank_that_it_names():
    where = "rank 1, step 8, samples 3"
    records = {rank: record(where=where, what="the loss is not finite", rank=rank, time=rank) for rank in range(3)}
    assert first_cause(Ending(failed=dict.fromkeys(range(3), 1), records=records)).rank == 1
    del records[1]  # it was ended before it could write
    assert first_cause(Ending(failed=dict.fromkeys(range(3), 1), records=records)).rank == 0


def test_a_process_that_left_no_word_is_named_with_its_own_machine():
    warning = "[W socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    ending = Ending(failed={1: -9}, words={1: f"{warning}\nthe last line"}, hosts={1: "n2"})
    cause = first_cause(ending)
    assert cause is not None
    assert (cause.rank, cause.host, cause.what) == (1, "n2", "rank 1 was killed by SIGKILL")
    assert cause.excerpt == "last output of rank 1:\nthe last line"
    ending.words[1] = warning
    assert first_cause(ending).excerpt == ""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"code": -9}, "rank 1 on n2 was killed by SIGKILL; cleaning up"),
        ({"code": 1, "record": record()}, "rank 1 on n2: out of memory; cleaning up"),
        ({"code": 1, "record": record(consequence=True)}, None),
        ({"code": 2, "record": record(exit_code=2)}, None),
    ],
)
def test_a_failure_is_said_as_soon_as_its_agent_knows(said, told):
    heard = []
    head = _Head([], Watch(on_warning=heard.append))
    for _ in range(2):
        head._report_exit(WorkerExited(rank=1, host="n2", **said))
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
    head = _Head([line], Watch(on_stop=lambda: shown.append("press Ctrl-C again"), on_warning=shown.append))
    *before, last = signals
    for number, requests in enumerate(before):
        if number == len(before) - 1:
            head._take(line, HeadReplaced())
        head.obey(requests)
    assert line.sent == [WorkerCommand("stop")]
    head.obey(last)
    assert line.sent == [WorkerCommand("stop"), WorkerCommand("kill")]
    assert head.ending.interrupted == 2
    assert "press Ctrl-C again" in shown


def test_last_words_are_of_this_start(tmp_path):
    (tmp_path / "1.log").write_bytes(b"of an earlier start\n" + b"now \xff\n" * 20)

    class Started:
        _orders = Orders({}, str(tmp_path), Rendezvous((2,)))
        log_starts = {1: 20}  # noqa: RUF012 - nobody changes it

    words = _last_words(Started(), 1).splitlines()
    assert len(words) == 8
    assert set(words) == {"now \ufffd"}
    assert _last_words(Started(), 0) == ""


def test_nohup_stays_what_it_is():
    """Who starts a run so that it outlives the terminal doesn't want its end to stop it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_like_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_last_saved_step_is_known_here_and_where_the_checkpoints_are_elsewhere(tmp_path):
    folder = RunFolder(tmp_path / "a run")
    folder.path.mkdir()
    assert saved_step(folder) is None
    assert "stopped before anything was saved" in str(interrupted(folder))
    for step in (7, 40):
        append(folder.events, Event(time=1.0, kind="saved", step=step))
    assert (saved_step(folder), kept_step(folder)) == (40, None)  # the checkpoints were deleted
    for local in (True, False):
        folder.machines.write_text(json.dumps([{"host": "n1", "local": local, "ranks": [0, 1], "folder": "/run"}]))
        assert kept_step(folder) == (None if local else 40)
    (folder.checkpoints / "step-00000050").mkdir(parents=True)
    (folder.checkpoints / ".step-00000060.part").mkdir()
    told = str(interrupted(folder))
    assert "the last checkpoint is step 50" in told
    assert f"resume from step 50: manyhands resume '{folder.path}'" in told


@pytest.mark.parametrize("fault", [RunError("n2 has no Python", "n2"), ValueError("a mistake of ours")])
def test_what_ends_a_run_before_its_first_start_is_noted_and_not_hidden_by_a_disk_that_is_gone(fault, tmp_path):
    there, gone = RunFolder(tmp_path), RunFolder(tmp_path / "gone")
    for folder in (there, gone):
        with pytest.raises(type(fault)) as raised, ends_noted(load_job({"data.name": "digits"}).job, folder):
            raise fault
        assert raised.value is fault
    (event,) = read_lines(there.events)
    assert event["kind"] == "failed"
    assert str(fault).splitlines()[0] in event["message"]


def halt_of_the_head(job, folder):
    with ends_noted(job, folder):
        raise KeyboardInterrupt


def halt_of_processes_that_had_not_begun(job, folder):
    conclude(job, folder, Ending(interrupted=1))


@pytest.mark.parametrize("halt", [halt_of_the_head, halt_of_processes_that_had_not_begun])
@pytest.mark.parametrize(("saved", "code", "kind"), [(None, 130, "interrupted"), (40, 75, "stopped")])
def test_a_stop_while_nothing_trains_loses_nothing_of_what_was_saved(halt, saved, code, kind, tmp_path):
    folder, job = RunFolder(tmp_path), load_job({"data.name": "digits"}).job
    if saved is not None:
        (folder.checkpoints / f"step-{saved:08}").mkdir(parents=True)
    with pytest.raises(ManyhandsError) as raised:
        halt(job, folder)
    assert raised.value.exit_code == code
    assert "without a save" not in raised.value.message
    last = [*read_lines(folder.events)][-1]
    assert (last["kind"], last["step"], last["message"]) == (kind, saved, raised.value.message)


def second_halt_of_the_head(job, folder):
    with ends_noted(job, folder):
        try:
            raise KeyboardInterrupt
        finally:  # what ends agents, say
            raise KeyboardInterrupt


def second_halt_of_processes_that_had_not_begun(job, folder):
    conclude(job, folder, Ending(interrupted=2))


@pytest.mark.parametrize("halt", [second_halt_of_the_head, second_halt_of_processes_that_had_not_begun])
def test_a_second_wish_ends_at_once_whatever_was_saved(halt, tmp_path):
    folder, job = RunFolder(tmp_path), load_job({"data.name": "digits"}).job
    (folder.checkpoints / "step-00000040").mkdir(parents=True)
    with pytest.raises(ManyhandsError, match="the last checkpoint is step 40") as raised:
        halt(job, folder)
    assert raised.value.exit_code == 130


def test_a_second_wish_and_a_process_that_hangs_leave_unsaved_work(tmp_path):
    folder, job = RunFolder(tmp_path), load_job({"data.name": "digits"}).job
    (folder.checkpoints / "step-00000040").mkdir(parents=True)
    for ending in (Ending(interrupted=2, failed={0: -9}), Ending(interrupted=1, hung="rank 1 is stopped")):
        with pytest.raises(ManyhandsError, match="stopped without a save") as raised:
            conclude(job, folder, ending)
        assert raised.value.exit_code == 130


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("fault", [{"failed": {1: -9}}, {"lost": {"n2": "the connection ended"}}])
def test_what_ends_after_the_stops_checkpoint_was_committed_takes_nothing_away(fault, noted, tmp_path):
    folder, job = RunFolder(tmp_path), load_job({"data.name": "digits"}).job
    for kind, step in (("started", None), ("stopping", 368)):
        append(folder.events, Event(time=1.0, kind=kind, step=step))
    (folder.checkpoints / "step-00000368").mkdir(parents=True)
    if noted:
        append(folder.events, Event(time=1.0, kind="stopped", step=368, message="stopped and saved at step 368"))
    outcome = conclude(job, folder, Ending(interrupted=1, **fault))
    assert (outcome.status, outcome.exit_code) == ("stopped", 75)
    stops = [line["step"] for line in read_lines(folder.events) if line["kind"] == "stopped"]
    assert stops == [368]


@pytest.mark.parametrize("turns", [[("stopping", 368)], [("stopping", 300), ("started", None)]])
def test_a_process_that_is_killed_before_the_stops_checkpoint_is_committed_is_a_failure(turns, tmp_path):
    """The checkpoint of an earlier step, or of an earlier stop, isn't what was asked for."""
    folder, job = RunFolder(tmp_path), load_job({"data.name": "digits"}).job
    (folder.checkpoints / "step-00000300").mkdir(parents=True)
    for kind, step in turns:
        append(folder.events, Event(time=1.0, kind=kind, step=step))
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL") as raised:
        conclude(job, folder, Ending(interrupted=1, failed={1: -9}))
    assert raised.value.exit_code == 1
    assert any("of step 300" in line for line in raised.value.hints)


@pytest.mark.parametrize(("saved", "code", "kind"), [(None, 130, "interrupted"), (300, 75, "stopped")])
def test_a_worker_that_a_stop_ends_before_it_trains_has_not_failed(saved, code, kind, tmp_path):
    """Its peer, which was ready, sees it go."""
    folder, job = RunFolder(tmp_path), load_job({"data.name": "digits"}).job
    if saved is not None:
        (folder.checkpoints / f"step-{saved:08}").mkdir(parents=True)
    peer = record(consequence=True, what="Connection closed by peer", rank=0)
    with pytest.raises(RunError, match="out of memory"):
        conclude(job, folder, Ending(interrupted=1, failed={0: 1, 1: -15}, records={0: record()}))
    with pytest.raises(ManyhandsError) as raised:
        conclude(job, folder, Ending(interrupted=1, failed={0: 1, 1: -15}, records={0: peer}))
    assert raised.value.exit_code == code
    assert [*read_lines(folder.events)][-1]["kind"] == kind


def test_what_a_second_stop_does_to_workers_is_no_failure(tmp_path):
    folder, job = RunFolder(tmp_path), load_job({"data.name": "digits"}).job
    peer = record(consequence=True, what="Connection closed by peer", rank=0)
    with pytest.raises(ManyhandsError, match="stopped before anything was saved") as raised:
        conclude(job, folder, Ending(interrupted=2, failed={0: 1, 1: -9}, records={0: peer}))
    assert raised.value.exit_code == 130


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stop_at_any_moment_of_the_start_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for tenths in range(1, 40, 6):
        with running("train", "digits", "mlp", "--epochs", "100000", "-n", "2", "--out", f"run{tenths}") as process:
            wait_until(Path(f"run{tenths}", "ranks").exists, process)
            time.sleep(tenths / 10)
            process.send_signal(signal.SIGTERM)
            ended = finish(process)
        assert ended.code in (75, 130), (tenths, ended)


def test_an_earlier_commands_stop_is_not_taken_for_that_of_processes_that_failed_before_they_had_started(tmp_path):
    folder, job = RunFolder(tmp_path), load_job({"data.name": "digits"}).job
    (folder.checkpoints / "step-00000300").mkdir(parents=True)
    for kind, step in (("started", None), ("stopping", 300), ("stopped", 300)):
        append(folder.events, Event(time=1.0, kind=kind, step=step))
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        conclude(job, folder, Ending(interrupted=1, failed={1: -9}), len(starts_and_stops(folder)))


def test_a_start_of_old_is_told_with_the_machine_of_then_or_with_none(tmp_path):
    folder = RunFolder(tmp_path)
    folder.job.write_text("")
    folder.environment.write_text('{"ranks": [{"host": "n1"}]}')
    for number, data in enumerate(({}, {"host": "n2"})):
        append(folder.events, Event(time=1.0 + number, kind="restarted", message="m", data=data))
    first, second = explained(read_run(tmp_path)).done
    assert "n1" not in first + second
    assert "restarted (n2, " in second


def test_who_takes_part_in_a_run_that_goes_on_and_who_was_taken_up_is_told(tmp_path):
    folder = RunFolder(tmp_path)
    folder.job.write_text("")
    places = [
        {"host": f"n{number}", "ranks": ranks, "folder": "/r", "local": False}
        for number, ranks in enumerate(([0, 2], [2, 1]), 1)
    ]
    folder.machines.write_text(json.dumps(places))
    append(folder.events, Event(time=1.0, kind="regrouped", message="n2 can join: restarting from step 8"))
    head = Running(time=1.0, pid=1, created=1.0, host="n1", run=str(tmp_path), hosts=["n1", "n2"], command=[])
    told = explained(read_run(tmp_path), head)
    assert "on: n1 (ranks 0 to 1), n2 (rank 2)" in told.lines()
    assert re.fullmatch("restarted with another machine .*: n2 can join: restarting from step 8", told.done[0])
    assert not explained(read_run(tmp_path)).machines


def test_a_run_whose_head_was_replaced_says_so_and_where_to_ask(tmp_path):
    folder = RunFolder(tmp_path)
    folder.job.write_text("")
    append(folder.events, Event(time=1.0, kind="saved", step=8, message="s"))
    append(folder.events, Event(time=2.0, kind="stopped", step=8, message="saved"))
    note(folder, REPLACED, "the run was stopped from n2 or taken over by another launcher")
    found = explained(read_run(tmp_path))
    assert found.cause == "the run was stopped from n2 or taken over by another launcher"
    assert "on the other launcher's machine, run manyhands why" in found.do[0]
    append(folder.events, Event(time=time.time(), kind="resumed", step=8, message="r"))
    append(folder.events, Event(time=time.time(), kind="stopped", step=9, message="saved"))
    assert "was asked to stop" in explained(read_run(tmp_path)).cause


@pytest.mark.slow
def test_a_machine_that_is_dead_when_the_user_stops_is_named_and_a_second_wish_ends_at_once(tmp_path):
    """Neither ssh nor the machine says that it has gone: both ends of the line are a process that never answers."""
    process = subprocess.Popen(["sleep", "300"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    link = AgentConnection(Machine("n2"), process, tmp_path / "log", here=False)
    began, heard = time.monotonic(), []

    def tell(text):
        heard.append((time.monotonic() - began, text))
        os.kill(os.getpid(), signal.SIGINT)

    ticks = iter([lambda: os.kill(os.getpid(), signal.SIGINT)])
    watch = Watch(lambda: next(ticks, lambda: None)(), on_warning=tell)
    ending = supervise_once({link: Orders({}, str(tmp_path), Rendezvous((2,)))}, watch)
    assert ending.interrupted
    assert list(ending.lost) == ["n2"]
    [(after_s, said)] = heard
    assert said == "waiting for n2 (no response); press Ctrl-C again to stop at once"
    assert AWAITED_S < after_s < SILENT_S
    assert time.monotonic() - began < after_s + KILL_S


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
    ended = said(tmp_path, WorkersStarted(0, [1]), WorkersEnded(failed={0: -9}, host="n2"))
    links = [spoken_by(tmp_path, "n2", f"{ended}; exec tee {heard}"), spoken_by(tmp_path, "n1", "sleep 4")]
    told = []
    watch = Watch(recovers=True, on_warning=told.append)
    ending = supervise_once(dict.fromkeys(links, Orders({}, str(tmp_path), Rendezvous((1, 1)))), watch)
    assert told == [f"n1 is lost: {ending.lost['n1']}; cleaning up"]
    assert ending.failed == {0: -9}
    assert list(ending.lost) == ["n1"]
    assert not links[0].closed
    close_all(links)
    assert heard.read_bytes().count(b'"is": "Alive"') > 1


def test_what_came_while_the_head_stood_still_keeps_a_machine_from_being_given_up(tmp_path):
    link = spoken_by(tmp_path, "n2", f"{said(tmp_path, WorkersStarted(0, [1]))}; exec cat")
    head = _Head([link], Watch())
    while not head._started:
        head.receive(link)
    link.last_received -= SILENT_S + 60  # and the pulse, which comes back, is read by nobody
    link.send(Alive())
    assert select.select([link], [], [], 60)[0]
    head.look()
    assert not head.ending.lost
    head.running.clear()
    close_all([link])


def test_a_memory_kill_is_read_from_the_cgroups_counter(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "CGROUPS", tmp_path)
    counter = "low 0\nhigh 0\nmax 7\noom {0}\noom_kill {0}\noom_group_kill 0\n"
    (tmp_path / "memory.events").write_text(counter.format(1))
    (tmp_path / "memory.max").write_text("67108864\n")
    kills = heartbeats.MemoryKills()
    assert kills.record(1, 42, None) is None
    (tmp_path / "memory.events").write_text(counter.format(3))
    found = [kills.record(rank, 42, None) for rank in (1, 2, 3)]
    assert [one and one.what for one in found] == [
        "rank 1 was killed by the kernel, out of memory (limit 64 MiB)",
        "rank 2 was killed by the kernel, out of memory (limit 64 MiB)",
        None,
    ]
    (tmp_path / "memory.events").unlink()
    assert heartbeats.MemoryKills().record(1, 42, None) is None


def test_a_machine_that_gave_up_a_launcher_that_was_itself_stopped_is_not_asked_about(tmp_path):
    link = spoken_by(tmp_path, "n2", "exit 0")
    link.process.wait()
    head = _Head([link], Watch())
    head._looked_at -= 60
    head.notice_pause()
    head.receive(link)
    cause = first_cause(head.ending)
    assert cause.what == "n2 is lost: the agent timed out while the launcher was suspended for 60 s"
    assert "keep the launcher's computer awake" in cause.hints[0]
