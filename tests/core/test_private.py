"""Who may read what a run writes, and what users share."""

import os
import stat

import pytest

from manyhands.config.job import Job
from manyhands.core.once import committed, one_at_a_time
from manyhands.core.private import private_files, usual_umask
from manyhands.core.world import ProcessInfo
from manyhands.run import train
from manyhands.worker import entry


@pytest.fixture
def usual():
    previous = os.umask(0o022)
    yield
    os.umask(previous)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_shared_keeps_the_users_own_permissions(usual, tmp_path):
    with private_files():
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "file").touch()
        assert usual_umask() == 0o022
        cached = tmp_path / "cache" / "file"
        with one_at_a_time(cached), committed(cached) as part:
            part.touch()
    (tmp_path / "after").touch()
    assert [mode(tmp_path / "run"), mode(tmp_path / "run" / "file")] == [0o700, 0o600]
    assert [mode(cached.parent), mode(cached), mode(tmp_path / "after")] == [0o755, 0o644, 0o644]
    assert usual_umask() == -1


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_that_takes_part_by_hand_writes_for_its_user_alone(usual, rank, tmp_path, monkeypatch):
    """Rank 1 may make the run folder on a machine of its own."""
    monkeypatch.chdir(tmp_path)

    def train_here(*_arguments):
        (tmp_path / "theirs").mkdir()
        return {"status": "finished", "step": 0, "folder": str(tmp_path / "theirs")}

    monkeypatch.setattr(entry, "train_here", train_here)
    train.train_in_process(Job(), ProcessInfo(rank=rank, size=2, started_by="--init"), quiet=True, objects=None)
    assert mode(tmp_path / "theirs") == 0o700
    assert usual_umask() == -1
