"""The list of runs that go on: what is in it lives, what doesn't is removed, and others' records are let be."""

import json
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cli.runs import ps
from manyhands.cluster.agents.folders import agent_lock, find_local_agents
from manyhands.core.errors import UserError
from manyhands.core.records import Event, Running, append, write_json
from manyhands.core.run_folder import RunFolder
from manyhands.core.stops import on_stop, request_stop, stop_signals_as_ctrl_c
from manyhands.report.follow import progress_object, read_progress
from manyhands.run import registry
from manyhands.run.folder import FolderWatch


def find_running(word):
    return registry.require_launcher(registry.find_run(word, active=True))


def record(run, *, pid=None, created=None, host=None, command=("x",)):
    me = psutil.Process()
    created = me.create_time() if created is None else created
    place = {"host": host or platform.node(), "pid": pid or me.pid, "created": created}
    return Running(time=time.time(), run=str(run), hosts=["n1"], command=list(command), **place)


def put(entry):
    registry.registry_folder().mkdir(parents=True, exist_ok=True)
    write_json(registry.registry_folder() / f"{entry.host}-{entry.pid}.json", entry)


def test_active_run_is_listed_with_the_machines_of_its_last_start_for_its_user_only(tmp_path, capsys):
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.path.mkdir(parents=True)
    with registry.registered(folder.path, ["n1", "n2"]):
        (found,) = registry.list_active_runs()
        assert (found.pid, found.name, found.hosts) == (os.getpid(), "a", ["n1", "n2"])
        assert stat.S_IMODE(registry.registry_folder().stat().st_mode) == 0o700
        assert registry.is_running(found)
        assert ps() == 0
        assert "n1,n2" in capsys.readouterr().out
        about = {"ranks": [0, 1], "folder": "run", "local": False}
        folder.machines.write_text(json.dumps([{"host": host, **about} for host in ("n1", "n3")]))
        assert ps() == 0
        assert "n1,n3" in capsys.readouterr().out
    assert registry.list_active_runs() == []
    assert not registry.is_running(found)
    with pytest.raises(KeyError), registry.registered(tmp_path / "b"):
        raise KeyError
    assert list(registry.registry_folder().iterdir()) == []


def test_a_run_whose_head_is_gone_is_listed_while_its_processes_work(tmp_path, capsys):
    ranks = tmp_path / "runs" / "a" / "ranks"
    process = subprocess.Popen([sys.executable, "-c", ""])
    gone = record(tmp_path / "runs" / "a", pid=process.pid, created=psutil.Process(process.pid).create_time())
    process.wait()
    put(gone)
    with agent_lock(ranks, 0):
        assert find_local_agents(ranks) == [os.getpid()]
        assert registry.list_active_runs() == []
        assert [entry.run for entry in registry.list_headless_runs()] == [gone.run]
        assert ps() == 0
        out, err = capsys.readouterr()
        assert "no launcher" in out
        assert "manyhands stop RUN" in err
        with pytest.raises(UserError, match="launcher of the run is gone, but its processes still train"):
            find_running("a")
        with registry.registered(tmp_path / "runs" / "a"):
            assert registry.list_headless_runs() == []
        assert [entry.run for entry in registry.list_headless_runs()] == [gone.run]
    assert registry.list_headless_runs() == []
    assert list(registry.registry_folder().iterdir()) == []


def test_records_of_the_dead_are_removed():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive = psutil.Process(process.pid)
    put(record("/a", pid=process.pid, created=alive.create_time()))
    assert [entry.run for entry in registry.list_active_runs()] == ["/a"]
    process.kill()
    # Not waited for yet: it is a zombie, which trains nothing.
    while alive.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert registry.list_active_runs() == []
    process.communicate()
    # The number was given to another process meanwhile.
    put(record("/b", created=1.0))
    assert registry.list_active_runs() == []
    assert list(registry.registry_folder().iterdir()) == []
    # Its clock was set meanwhile.
    put(record("/a", created=psutil.Process().create_time() - 3600, command=psutil.Process().cmdline()))
    assert [entry.run for entry in registry.list_active_runs()] == ["/a"]


def test_another_machines_record_is_taken_at_its_word_and_silence_is_shown(tmp_path, capsys):
    put(record("/shared/a", pid=2**22 + 1, host="n7"))
    (found,) = registry.list_active_runs()
    assert read_progress(found).state == "unknown"
    registry.signal_launcher(found, 0)
    for name, silent_s in (("new", 0), ("old", 7500)):
        folder = tmp_path / name
        folder.mkdir()
        entry = record(folder, pid=2**22 + silent_s, host="n7")
        put(entry.model_copy(update={"time": time.time() - 9000}))
        append(RunFolder(folder).events, Event(time=time.time() - silent_s, kind="started", message="m"))
    ps()
    (silent,) = [line for line in capsys.readouterr().out.splitlines() if "silent" in line]
    assert all(words in silent for words in ("on n7, silent for 2h05m", "/old "))


def test_what_is_no_record_is_let_be(tmp_path):
    with registry.registered(tmp_path / "a"):
        (registry.registry_folder() / "other.json").write_text("{}")
        (registry.registry_folder() / "torn.json").write_text('{"v": 1')
        write_json(registry.registry_folder() / "newer.json", {**record("/c").model_dump(), "v": 99})
        assert [entry.name for entry in registry.list_active_runs()] == ["a"]
    assert {path.name for path in registry.registry_folder().iterdir()} == {"other.json", "torn.json", "newer.json"}
    put(record("a\0b", host="n7"))
    put(record("/nowhere/run"))
    assert [each.run for each in registry.list_active_runs()] == ["/nowhere/run"]


def test_a_state_folder_that_cannot_be_written_costs_the_listing_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with registry.registered(tmp_path / "a"):
        pass
    assert "can't register this run" in capsys.readouterr().err


NAMES = st.lists(st.text("ab-1", min_size=1, max_size=5), min_size=1, max_size=8, unique=True)


@given(names=NAMES, data=st.data())
def test_any_part_of_a_name_is_enough_where_one_run_has_it_and_the_strictest_reading_wins(names, data):
    assert registry.matching_names(names[0], names) == [names[0]]
    assert registry.matching_names("", names) == []
    first = data.draw(st.integers(0, len(names[0]) - 1))
    part = names[0][first : data.draw(st.integers(first + 1, len(names[0])))]
    found, begins = registry.matching_names(part, names), sorted(name for name in names if name.startswith(part))
    assert found
    assert all(name in begins if begins else part in name for name in found)
    assert part not in names or found == [part]
    if sum(part in name for name in names) == 1:
        assert found == [names[0]]
    assert registry.matching_names(part, names, parts=False) == ([part] if part in names else begins)


def ended(run, started):
    run.mkdir(parents=True)
    (run / "job.toml").touch()
    os.utime(run / "job.toml", (started, started))
    return run


def test_ended_runs_are_found_by_a_part_of_their_names_or_as_the_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match='no run is called "last"'):
        registry.find_run("last")
    ended(tmp_path / "runs" / "2026-11-25-digits-mlp", 1000)
    ended(tmp_path / "runs" / "2026-11-25-mnist-cnn", 2000)
    assert registry.find_reference("digits").name == "2026-11-25-digits-mlp"
    with pytest.raises(UserError, match='"11-25" matches 2 runs'):
        registry.find_run("11-25")
    assert registry.find_run("last").path.name == "2026-11-25-mnist-cnn"
    assert "the last run is runs/2026-11-25-mnist-cnn" in capsys.readouterr().err
    ended(tmp_path / "elsewhere", 3000)
    assert registry.find_run("last").path.name == "elsewhere"
    assert [registry.resolve_resume(word) for word in ("auto", "mnist", "x.pth.tar", None)] == [
        "auto", "runs/2026-11-25-mnist-cnn", "x.pth.tar", None,
    ]  # fmt: skip
    assert registry.read_run_named("mnist") is None, "a data set's name stays one"
    running_run = ended(tmp_path / "far" / "away", 4000)
    put(record(running_run))
    assert registry.find_run("last").path == running_run
    assert find_running("last").run == str(running_run)
    ended(tmp_path / "runs" / "newest", 5000)
    with pytest.raises(UserError, match="the run is not active"):
        find_running("last")
    ended(tmp_path / "last", 100)
    assert registry.find_run("last").path.resolve() == tmp_path / "last"


def test_words_that_mean_no_run_or_several_are_refused_and_the_head_here_is_the_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended(tmp_path / "runs" / "digits-old", 1000)
    put(record(tmp_path / "digits-new", host="gone-1"))
    put(record(tmp_path / "digits-new", host="gone-2"))
    assert find_running("digits").name == "digits-new"  # a run that works comes before ended ones
    put(record(tmp_path / "digits-new"))
    assert find_running("digits").is_local
    with pytest.raises(UserError, match="matches 2 runs"):
        registry.find_run("digits")
    for find in (registry.find_run, find_running):
        with pytest.raises(UserError, match='no run is called "nosuch"') as caught:
            find("nosuch")
        assert caught.value.hints == ("runs: digits-new, digits-old",)
    with pytest.raises(UserError, match="the run is not active"):
        find_running("old")
    with pytest.raises(UserError, match='no run is called "digits-nw"') as caught:
        find_running("digits-nw")
    assert caught.value.hints[0] == 'did you mean "digits-new"?'
    put(record(tmp_path / "digits-mlp", pid=os.getppid(), created=psutil.Process(os.getppid()).create_time()))
    with pytest.raises(UserError, match="matches 2 runs"):
        find_running("digits")
    assert find_running("digits-m").name == "digits-mlp"


def test_a_run_without_records_yet_is_starting_and_one_that_has_taken_up_a_machine_is_not_stopping(tmp_path):
    with registry.registered(tmp_path / "run"):
        (found,) = registry.list_active_runs()
        folder = RunFolder(tmp_path / "run")
        folder.path.mkdir(exist_ok=True)
        about = progress_object(found, now := read_progress(found))
        assert (now.state, about["step"], about["top1"], about["processes"]) == ("starting", None, None, None)
        for kind, state in [("started", "starting"), ("stopping", "stopping"), ("regrouped", "starting")]:
            append(folder.events, Event(time=time.time(), kind=kind, message=kind))
            assert read_progress(found).state == state


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A run folder and what is said of each look at it."""
    monkeypatch.setattr("manyhands.run.folder.POLL_S", 0.0)
    folder = RunFolder(tmp_path / "run")
    folder.failures.mkdir(parents=True)
    folder.job.write_text("[data]\n")
    folder.plan.write_text("{}")
    said = []
    watch = FolderWatch(folder.path, said.append)

    def look():
        said.clear()
        watch.check()
        return said

    assert look() == []
    return folder, look


def test_a_run_folder_that_is_moved_is_written_on_in_its_new_place(watched, tmp_path):
    folder, look = watched
    with registry.registered(folder.path):
        (moved := RunFolder(tmp_path / "elsewhere")).path.mkdir()
        folder.path.rename(moved.path / "new")
        folder.checkpoints.mkdir(parents=True)  # by a process that saves before anyone has noticed
        (said,) = look()
        assert f"was moved to {moved.path}/new" in said
        append(folder.events, Event(time=1.0, kind="saved"))
        assert (moved.path / "new" / "events.jsonl").is_file()
        assert (moved.path / "new" / "written-while-moved-1" / "checkpoints").is_dir()
        assert look() == []
        assert {entry.run for entry in registry.list_active_runs()} == {str(moved.path / "new")}
        assert find_running(str(moved.path / "new")).pid == find_running(str(folder.path)).pid == os.getpid()


def test_small_files_that_are_deleted_are_made_again_and_nothing_stops(watched):
    folder, look = watched
    folder.job.unlink()
    folder.plan.unlink()
    with on_stop(lambda number, _frame: pytest.fail(f"stopped by {number}")):
        reported = list(look())
        assert {f"{path} was deleted and has been restored" for path in (folder.job, folder.plan)} == set(reported)
        assert (folder.job.read_text(), folder.plan.read_text()) == ("[data]\n", "{}")
        shutil.rmtree(folder.ranks)
        (reported,) = look()
        assert "ranks was deleted and has been restored" in reported
        assert look() == []


@pytest.mark.parametrize("left", ["nothing", "the folder", "a job file that was written again"])
def test_a_run_folder_that_is_deleted_is_made_again_and_the_run_is_asked_once_to_stop(watched, left):
    folder, look = watched
    folder.job.write_text("[model]\n")
    look()
    shutil.rmtree(folder.path)
    if left != "nothing":
        folder.path.mkdir()
    if left.startswith("a job"):
        folder.job.write_text("[model]\n")
    asked = []
    with on_stop(lambda number, _frame: asked.append(number)):
        (said,) = look()
        assert "was deleted" in said
        assert folder.job.read_text() == "[model]\n"
        assert folder.failures.is_dir()
        assert look() == []
        shutil.rmtree(folder.ranks)  # by the same command, which takes its time
        folder.plan.unlink()
        assert look() == []
    assert asked == [signal.SIGTERM]
    assert folder.failures.is_dir()


def test_a_stop_is_requested_of_the_innermost_block_from_any_thread_and_of_none_that_could_not_save():
    asked = []
    assert not request_stop()
    with stop_signals_as_ctrl_c():
        assert not request_stop()
        with on_stop(lambda number, _frame: asked.append(number)):
            with stop_signals_as_ctrl_c():
                assert not request_stop()
            thread = threading.Thread(target=request_stop)
            thread.start()
            thread.join()
    assert asked == [signal.SIGTERM]
