"""job.toml says what was asked for, and behind it what became of it."""

import tomllib
from pathlib import Path

from manyhands.cluster.agents.folders import replace_job
from manyhands.config.job import Job
from manyhands.core.run_folder import RunFolder
from manyhands.worker.run_metadata import job_text


def test_what_was_chosen_stands_behind_what_was_asked_for():
    job = Job()
    text = job_text(job, {"data.augment": "crop-flip", "data.mean": [0.13], "data.image_size": 28})
    assert 'augment = "auto"  # here: "crop-flip"' in text
    assert "mean = []  # here: [0.13]" in text
    assert "image_size = 0  # here: 28" in text
    assert Job.model_validate(tomllib.loads(text)) == job


def test_a_job_that_differs_in_comments_alone_is_not_kept_twice(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("{}\n")
    for text in ("a = 1\n", "a = 1  # here: 2\n"):
        replace_job(folder, text)
    assert not (tmp_path / "job-1.toml").exists()
    replace_job(folder, "a = 3\n")
    assert (tmp_path / "job-1.toml").read_text() == "a = 1  # here: 2\n"
