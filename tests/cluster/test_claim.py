"""A run folder belongs to one run at a time, on whichever machine it lies, and its newest launcher is obeyed."""

import os

import pytest
from filelock import Timeout
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.agents import folders
from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.connection import close_all
from manyhands.cluster.agents.machines import open_local_agent
from manyhands.cluster.agents.protocol import OpenRun
from manyhands.cluster.messages import call
from manyhands.core.run_folder import RunFolder
from manyhands.core.scratch import scratch

HOLDER, OTHER = "a" * 32, "b" * 32


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ranks").mkdir()
    return RunFolder(tmp_path)


def test_one_start_at_a_time(folder):
    lock = folders.claim_run_folder(folder, HOLDER)
    assert lock
    assert folders.claim_run_folder(folder, HOLDER) is None  # another machine of the same run, on the same disk
    with pytest.raises(Timeout):
        folders.claim_run_folder(folder, OTHER)
    lock.release()
    lock = folders.claim_run_folder(folder, OTHER)
    assert lock
    lock.release()


@pytest.mark.slow
def test_processes_whose_head_was_killed_keep_the_folder_until_they_have_left(folder, monkeypatch):
    monkeypatch.setattr("manyhands.cluster.agents.folders.LEAVING_S", 0.1)
    with folders.agent_lock(folder.ranks, 0):
        with pytest.raises(Timeout):
            folders.claim_run_folder(folder, HOLDER)
        assert not (folder.ranks / "holder").exists()
    lock = folders.claim_run_folder(folder, HOLDER)
    assert lock
    with folders.agent_lock(folder.ranks, 0):  # its own agents begin later
        pass
    lock.release()


@pytest.fixture
def agents(tmp_path):
    """Of three machines, as far as a folder can tell: two of one run, and one of another."""
    links = [open_local_agent(tmp_path / f"agent{number}.log") for number in range(3)]
    yield links
    close_all(links)


def test_agents_keep_other_runs_out_and_tell_whose_a_folder_is(agents, tmp_path):
    def ask(link, holder, run):
        return link.ask(call(Agent.open_run, OpenRun(str(tmp_path / "run"), "none", holder, run)), 30)

    first, same, other = agents
    assert ask(first, HOLDER, "1" * 32).run == ""
    assert not ask(same, HOLDER, "1" * 32).taken
    assert ask(other, OTHER, "2" * 32).taken
    assert folders.run_id(RunFolder(tmp_path / "run")) == "1" * 32
    (tmp_path / "run" / "job.toml").touch()
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    close_all([first])
    answer = ask(other, OTHER, "2" * 32)
    assert answer.run == "1" * 32
    assert not answer.taken
    assert folders.run_id(RunFolder(tmp_path / "run")) == "1" * 32


def test_ids_and_terms_are_ours_or_none(folder):
    assert not folders.run_id(folder)
    made = folders.set_run_id(folder)
    assert folders.run_id(folder) == made
    assert folders.set_run_id(folder) != made
    for junk in (b"", b"1", b"1 2 3", b"x y", b"\xff\xfe", b"../../x", b"a" * 4096, os.urandom(64)):
        (folder.ranks / "id").write_bytes(junk)
        assert not folders.run_id(folder)
        (folder.ranks / "term").write_bytes(junk)
        assert folders.read_term(folder.ranks) == folders.Term()
    assert folders.advance_term(folder.ranks, folders.Term(1)) == folders.Term(1)
    assert (folder.ranks / "term").stat().st_mode & 0o777 == 0o600


def test_who_was_cut_off_knows_that_a_later_start_is_at_work(folder):
    assert not folders.has_working_agents(folder.ranks, 0)
    with folders.agent_lock(folder.ranks, 1, 0):
        assert not folders.has_working_agents(folder.ranks, 0)
        with folders.agent_lock(folder.ranks, 0, 1):
            assert folders.has_working_agents(folder.ranks, 0)
            assert not folders.has_working_agents(folder.ranks, 1)
    assert not folders.has_working_agents(folder.ranks, 0)  # what an earlier run of the folder has left says nothing


@settings(max_examples=20)
@given(st.lists(st.builds(folders.Term, st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_the_highest_stands(wanted):
    with scratch("terms") as folder:
        assert folders.read_term(folder / "ranks") == folders.Term()
        for number, term in enumerate(wanted):
            assert folders.advance_term(folder / "ranks", term) == max(wanted[: number + 1])
        assert folders.read_term(folder / "ranks") == max([folders.Term(), *wanted])
