"""Where the later starts of a run go on from."""

import pytest

from manyhands.cluster.agents.supervise import Ending
from manyhands.config.load import load_job
from manyhands.core.folder import RunFolder
from manyhands.run.recovery import MOST_IN_VAIN, run_to_the_end


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.failures.mkdir(parents=True)
    (folder.checkpoints / "step-00000010").mkdir(parents=True)  # of an earlier run in the same folder
    return folder


@pytest.mark.parametrize("named", ["auto", "never", "runs/other"])
def test_what_the_user_names_holds_until_this_run_has_saved(folder, named):
    job, starts = load_job({"checkpoint.resume": named}, environment={}).job, []

    def start(job, number):
        starts.append((number, job.checkpoint.resume))
        if number == 1:
            (folder.checkpoints / "step-00000020").mkdir()
        return Ending(failed={0: -9})

    assert not run_to_the_end(job, folder, lambda *_: None, start).ok
    assert starts == [(0, named), (1, named), *((number, "auto") for number in range(2, 2 + MOST_IN_VAIN))]


def test_a_run_that_does_not_recover_has_one_start(folder):
    job, starts = load_job({"cluster.elastic": "off"}, environment={}).job, []
    run_to_the_end(job, folder, lambda *_: None, lambda _job, number: starts.append(number) or Ending(failed={0: -9}))
    assert starts == [0]
