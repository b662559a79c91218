"""The page that a run ends with never changes how the run has ended."""

import pytest

from manyhands.config.load import load_job
from manyhands.core.run_folder import RunFolder
from manyhands.report import page
from manyhands.run.outcome import report_on


@pytest.mark.parametrize(
    ("raised", "told"),
    [(OSError("disk full"), "disk full"), (KeyboardInterrupt, "to write the report, run manyhands report")],
)
def test_a_page_that_is_not_drawn_is_said_and_fails_nothing(raised, told, tmp_path, monkeypatch, capsys):
    (tmp_path / "metrics.jsonl").touch()

    def fails(_path):
        raise raised

    monkeypatch.setattr(page, "write_report", fails)
    report_on(load_job({"data.name": "digits"}, environment={}).job, RunFolder(tmp_path))
    assert told in capsys.readouterr().err
