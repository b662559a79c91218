"""Runs, a plan and a pack written before identifiers were renamed still load, resume and are reused.

older.tar.xz was written by the commit before, by `train digits net.py:Net -n 2 --batch 64`: two runs of 20 updates,
data parallel (whole/) and local steps (local/); and a plan for two processes and a pack of 12 pictures.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from manyhands.core.records import Failure
from tests.e2e.command import QUICK, run

ARCHIVE = Path(__file__).with_name("older.tar.xz")


@pytest.fixture
def older(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def weights(folder):
    return load_file(max(folder.glob("checkpoints/step-*")) / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "local"])
def test_a_run_resumes(older, name):
    resumed = run("resume", name, "--set", "train.max_steps=40", cwd=older)
    assert resumed.code == 0, resumed.err
    metrics = [json.loads(line) for line in (older / name / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in metrics) == 40
    if name == "whole":
        job = ["train", "digits", "net.py:Net", "-n", "2", "--batch", "64", "--device", "cpu", *QUICK]
        anew = run(*job, "--set", "train.max_steps=40", "--out", "anew", cwd=older)
        assert anew.code == 0, anew.err
        for key, value in weights(older / "anew").items():
            torch.testing.assert_close(weights(older / name)[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_plan_and_a_pack_are_read(older):
    planned = run("train", "digits", "net.py:Net", "--parallel.plan", "plan.json", "-n", "2", "--batch", "64",
                  "--device", "cpu", "--set", "train.max_steps=2", *QUICK, "--out", "planned", cwd=older)  # fmt: skip
    assert planned.code == 0, planned.err
    checked = run("pack", "packed", "--check", cwd=older)
    assert checked.code == 0, checked.err


def test_a_failure_record_is_read():
    record = {
        "time": 1.0,
        "rank": 0,
        "host": "n1",
        "pid": 7,
        "error": "ValueError",
        "what": "no",
        "mend": ["try again"],
    }
    assert Failure.model_validate(record).hints == ["try again"]
