"""What rank 0 writes down of a start before it trains."""

from manyhands.core.records import Event, append, read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.train.journal import Journal
from manyhands.worker.run_metadata import record_undone_steps
from tests.report.fake_run import FakeRun


def test_undone_steps_of_an_earlier_start_are_reported_once(tmp_path):
    folder = FakeRun(tmp_path / "run").begin().train(0, 120).folder

    def goes_on(time, step):
        append(folder.events, Event(time=time, kind="resumed", step=step))
        record_undone_steps(RunFolder(folder.path), Journal(RunFolder(folder.path), 0), step)
        return [line["data"] for line in read_lines(folder.events) if line["kind"] == "undone"]

    newest = max(line["step"] for line in read_lines(folder.metrics))
    later = max(line["time"] for line in read_lines(folder.metrics)) + 10
    undone = goes_on(later, 60)
    assert undone == [{"first": 61, "last": newest}]
    # This start is lost before a record of its own, with all that it made saved.
    assert goes_on(later + 10, 80) == undone
