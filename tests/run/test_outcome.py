"""How a run has ended: exit code, first cause, what was saved, and what `manyhands why` says; from records alone."""

import json
import re
import time

import pytest

from manyhands.checkpoint.folders import available_step, saved_step
from manyhands.cluster.failures import Ending, first_cause
from manyhands.config.load import load_job
from manyhands.core.errors import ManyhandsError, RunError
from manyhands.core.records import REPLACED, Event, Failure, Running, append, read_lines, write_json
from manyhands.core.run_folder import RunFolder
from manyhands.report import page
from manyhands.report.read import read_run
from manyhands.run import outcome
from tests.report.fake_run import step_record

JOB = load_job({"data.name": "digits", "cluster.hosts": ["n1", "n2"]}, environment={}).job


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "a run")
    folder.failures.mkdir(parents=True)
    folder.job.touch()
    return folder


def put(folder, *turns, saved=None):
    """Writes events, each a kind, perhaps with a step and a message, and a checkpoint. Failures are of the launcher."""
    for number, turn in enumerate(turns, 1):
        kind, step, message = [*turn.split("|"), "", ""][:3]
        about = {"step": int(step) if step else None, "message": message, "data": {"rankless": kind == "failed"}}
        append(folder.events, Event(time=number, kind=kind, **about))
    if saved is not None:
        (folder.checkpoints / f"step-{saved:08}").mkdir(parents=True)


def why(folder, head=None):
    return outcome.explain_run(read_run(folder.path), head)


def record(**more):
    given = {"time": 1.0, "rank": 1, "what": "out of memory", "where": "rank 1", **more}
    return Failure(host="n2", pid=1, error="RunError", **given)


PEER = record(consequence=True, what="Connection closed by peer", rank=0)
ENDED = Ending(interrupted=1, failed={0: 1, 1: -15}, records={0: PEER})
NOTHING, KILLED = "stopped before anything was saved", "rank 1 was killed by SIGKILL"


@pytest.mark.parametrize(
    ("saved", "turns", "ending", "code", "says"),
    [
        (None, [], Ending(interrupted=1), 130, NOTHING),
        (40, [], Ending(interrupted=1), 75, "the last checkpoint is step 40"),
        # A second wish ends at once, whatever was saved, and like a process that hangs leaves unsaved work.
        (40, [], Ending(interrupted=2), 130, "stopped without a save; the last checkpoint is step 40"),
        (40, [], Ending(interrupted=2, failed={0: -9}), 130, "stopped without a save"),
        (40, [], Ending(interrupted=1, hung="rank 1 is stopped"), 130, "stopped without a save"),
        (None, [], Ending(interrupted=2, failed={0: 1, 1: -9}, records={0: PEER}), 130, NOTHING),
        # A worker that a stop ends before it trains hasn't failed. Its peer, which was ready, sees it go.
        (None, [], ENDED, 130, NOTHING),
        (300, [], ENDED, 75, "the last checkpoint is step 300"),
        (None, [], Ending(interrupted=1, failed={0: 1, 1: -15}, records={0: record()}), 1, "out of memory"),
        # The checkpoint of an earlier step, or of an earlier stop, isn't what was asked for.
        (300, ["stopping|368"], Ending(interrupted=1, failed={1: -9}), 1, KILLED),
        (300, ["stopping|300", "started"], Ending(interrupted=1, failed={1: -9}), 1, KILLED),
    ],
)
def test_what_a_stop_has_ended_is_no_failure_unless_it_cost_the_save(saved, turns, ending, code, says, folder):
    put(folder, *turns, saved=saved)
    with pytest.raises(ManyhandsError, match=says) as raised:
        outcome.conclude(JOB, folder, ending)
    assert_noted(raised.value, code, saved, folder)
    assert ("without a save" in raised.value.message) == ("without a save" in says)


def assert_noted(error, code, saved, folder):
    """The last event is the error's, and an error that is none of a stop says from where to go on."""
    assert error.exit_code == code
    last = [*read_lines(folder.events)][-1]
    if code == 1:
        assert last["kind"] == "failed"
        assert any(f"of step {saved}" in hint for hint in error.hints) == (saved is not None)
    else:
        assert (last["kind"], last["message"]) == ("stopped" if code == 75 else "interrupted", error.message)
        assert last["step"] == saved


@pytest.mark.parametrize(("saved", "again", "code"), [(None, False, 130), (40, False, 75), (40, True, 130)])
def test_ctrl_c_before_the_first_start_is_the_stop_of_a_run(saved, again, code, folder):
    put(folder, saved=saved)

    def halted():
        try:
            raise KeyboardInterrupt
        finally:  # what ends agents, say
            if again:
                raise KeyboardInterrupt

    with pytest.raises(ManyhandsError) as raised, outcome.recording_errors(JOB, folder):
        halted()
    assert_noted(raised.value, code, saved, folder)
    assert ("without a save" in raised.value.message) == again


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("fault", [{"failed": {1: -9}}, {"lost": {"n2": "the connection ended"}}])
def test_what_ends_after_the_stops_checkpoint_was_committed_takes_nothing_away(fault, noted, folder):
    put(folder, "started", "stopping|368", *["stopped|368|stopped and saved at step 368"] * noted, saved=368)
    concluded = outcome.conclude(JOB, folder, Ending(interrupted=1, **fault))
    assert (concluded.status, concluded.exit_code) == ("stopped", 75)
    assert [line["step"] for line in read_lines(folder.events) if line["kind"] == "stopped"] == [368]


def test_an_earlier_commands_stop_is_not_taken_for_that_of_processes_that_failed_before_they_had_started(folder):
    put(folder, "started", "stopping|300", "stopped|300", saved=300)
    with pytest.raises(RunError, match=KILLED):
        outcome.conclude(JOB, folder, Ending(interrupted=1, failed={1: -9}), len(outcome.starts_and_stops(folder)))


@pytest.mark.parametrize(
    ("fault", "host", "cause", "hint"),
    [
        (RunError("it has no Python", "n2", ("install it",)), "n2", "machine n2: it has no Python", "install it"),
        (ValueError("a mistake"), "", "ValueError: a mistake", "nothing was saved: run the same command"),
    ],
)
def test_an_error_before_the_first_start_is_recorded_and_also_raised_if_that_fails(fault, host, cause, hint, folder):
    for place in (folder, RunFolder(folder.path / "gone")):
        with pytest.raises(type(fault)) as raised, outcome.recording_errors(JOB, place):
            raise fault
        assert raised.value is fault
    (event,) = read_lines(folder.events)
    assert event["kind"] == "failed"
    found = why(folder)
    assert (found.state, found.rank, found.host, found.cause) == ("failed", None, host, cause)
    assert found.do[0].startswith(hint)


def test_every_failure_of_a_run_that_has_saved_says_how_to_resume(folder):
    ending = Ending(failed={1: 1}, records={1: record()})
    assert "resume" not in str(outcome.error_of_ending(folder, ending))
    put(folder, saved=50)
    assert "resume from the last checkpoint, of step 50" in str(outcome.error_of_ending(folder, ending))
    ending.records[1] = record(hints=["make room, then manyhands resume x"])
    assert str(outcome.error_of_ending(folder, ending)).count("manyhands resume") == 1


def test_an_error_that_all_processes_raise_is_of_the_rank_that_it_names():
    where = "rank 1, step 8, samples 3"
    records = {rank: record(where=where, what="the loss is not finite", rank=rank, time=rank) for rank in range(3)}
    ending = Ending(failed=dict.fromkeys(range(3), 1), records=records)
    assert first_cause(ending).rank == 1
    del records[1]  # it was ended before it could write
    assert first_cause(ending).rank == 0


def test_a_process_that_left_no_word_is_named_with_its_own_machine():
    warning = "[W socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    ending = Ending(failed={1: -9}, words={1: f"{warning}\nthe last line"}, hosts={1: "n2"})
    cause = first_cause(ending)
    assert (cause.rank, cause.host, cause.what) == (1, "n2", KILLED)
    assert "out-of-memory" in cause.hints[0]
    assert cause.excerpt == "last output of rank 1:\nthe last line"
    ending.words[1] = warning
    assert first_cause(ending).excerpt == ""


def test_the_last_saved_step_is_known_here_and_where_the_checkpoints_are_elsewhere(folder):
    assert saved_step(folder) is None
    assert NOTHING in str(outcome.record_interrupt(folder))
    put(folder, "saved|7", "saved|40")
    assert (saved_step(folder), available_step(folder)) == (40, None)  # the checkpoints were deleted
    for local in (True, False):
        folder.machines.write_text(json.dumps([{"host": "n1", "local": local, "ranks": [0, 1], "folder": "/run"}]))
        assert available_step(folder) == (None if local else 40)
    put(folder, saved=50)
    (folder.checkpoints / ".step-00000060.part").mkdir()
    text = str(outcome.record_interrupt(folder))
    assert "the last checkpoint is step 50" in text
    assert f"resume from step 50: manyhands resume '{folder.path}'" in text


@pytest.mark.parametrize(
    ("raised", "reported"),
    [(OSError("disk full"), "disk full"), (KeyboardInterrupt, "to write the report, run manyhands report")],
)
def test_a_page_that_is_not_drawn_is_said_and_fails_nothing(raised, reported, folder, monkeypatch, capsys):
    def fails(_path):
        raise raised

    folder.metrics.touch()
    monkeypatch.setattr(page, "write_report", fails)
    outcome.report_on(JOB, folder)
    assert reported in capsys.readouterr().err


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        (["started"], "ended without a record .* ago\nwhy: no process recorded an error(.|\n)*do: resume from step 8:"),
        (["stopped|8"], "stopped after .*; everything is saved\nwhy: the run was asked to .*\ndo: resume from step 8:"),
        (["undone|8|steps 9 to 11 are repeated", "finished|99", "failed||n7"], "finished after .*\ndone: steps 9 to"),
    ],
)
def test_each_end_has_a_headline_with_the_progress_and_a_hint(turns, says, folder):
    put(folder, *turns, saved=8)
    append(folder.metrics, step_record(99))
    found = why(folder)
    assert "at step 99 of 1000" in found.headline
    assert re.search(says, reported := "\n".join(found.lines())), reported


@pytest.mark.parametrize("rankless", [True, False])
def test_the_cause_is_of_the_last_start_also_where_its_head_left_no_word(rankless, folder):
    put(folder, "started")
    append(folder.events, Event(time=2.0, kind="failed", message="the cable of n2", data={"rankless": rankless}))
    append(folder.events, Event(time=3.0, kind="resumed", step=5))
    assert "the cable of n2" not in "\n".join(why(folder).lines())
    mine = Failure(time=4.0, rank=1, host="n3", pid=7, step=9, error="KeyError", what="KeyError: a mistake of mine")
    write_json(folder.failures / "1.json", mine)
    found = why(folder)
    assert (found.state, found.rank, found.host, found.step) == ("failed", 1, "n3", 9)
    assert "a mistake of mine" in found.cause


def test_machines_of_an_active_run_and_joined_machines_are_shown(folder):
    places = [{"host": "n1", "ranks": [0, 2]}, {"host": "n2", "ranks": [2, 1]}]
    folder.machines.write_text(json.dumps([{**place, "folder": "/r", "local": False} for place in places]))
    put(folder, "saved|8", "stopped|8", "regrouped||n2 can join: restarting from step 8")
    head = Running(time=1.0, pid=1, created=1.0, host="n1", run=str(folder.path), hosts=["n1", "n2"], command=[])
    reported = why(folder, head)
    assert "on: n1 (ranks 0 to 1), n2 (rank 2)" in reported.lines()
    assert re.search("is active on n1, .*, at step 8; last record .* ago", reported.headline)
    assert not reported.cause
    assert re.fullmatch("restarted with another machine .*: n2 can join: restarting from step 8", reported.done[0])
    assert not why(folder).machines


def test_a_run_whose_head_was_replaced_says_so_and_where_to_ask(folder):
    put(folder, "saved|8|s", "stopped|8|saved")
    replaced = "the run was stopped from n2 or taken over by another launcher"
    outcome.record_event(folder, REPLACED, replaced)
    found = why(folder)
    assert found.cause == replaced
    assert "on the other launcher's machine, run manyhands why" in found.do[0]
    for kind, step in (("resumed", 8), ("stopped", 9)):
        append(folder.events, Event(time=time.time(), kind=kind, step=step, message="m"))
    assert "was asked to stop" in why(folder).cause
