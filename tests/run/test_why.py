"""`manyhands why` of records that no run has to be made for."""

import pytest

from manyhands.core.records import Event, Failure, append, write_json
from manyhands.core.run_folder import RunFolder
from manyhands.report.read import read_run
from manyhands.run.outcome import explained


@pytest.mark.parametrize("rankless", [True, False])
def test_the_cause_is_of_the_last_start_also_where_its_head_left_no_word(rankless, tmp_path):
    folder = RunFolder(tmp_path)
    folder.job.touch()
    folder.failures.mkdir(parents=True)
    append(folder.events, Event(time=1.0, kind="started"))
    append(folder.events, Event(time=2.0, kind="failed", message="the cable of n2", data={"rankless": rankless}))
    append(folder.events, Event(time=3.0, kind="resumed", step=5))
    assert "the cable of n2" not in "\n".join(explained(read_run(tmp_path)).lines())
    record = Failure(time=4.0, rank=1, host="n3", pid=7, step=9, error="KeyError", what="KeyError: a mistake of mine")
    write_json(folder.failures / "1.json", record)
    headline = explained(read_run(tmp_path))
    assert (headline.state, headline.rank, headline.host, headline.step) == ("failed", 1, "n3", 9)
    assert "a mistake of mine" in headline.cause


def test_a_run_whose_checkpoints_are_gone_is_not_said_to_continue(tmp_path):
    folder = RunFolder(tmp_path)
    folder.job.touch()
    append(folder.events, Event(time=1.0, kind="started"))
    append(folder.events, Event(time=2.0, kind="saved", step=40))
    append(folder.events, Event(time=3.0, kind="stopped", step=40))
    assert explained(read_run(tmp_path)).do == [
        f"no checkpoint is left in {folder.checkpoints}: restore one from a copy, or use another --out"
    ]
