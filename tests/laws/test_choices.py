"""A new data set, network, mode, sync method, cluster format or check is one file; nothing else is edited.

The examples of CONTRIBUTING.md are added to a copy of the installed package and used from the command line.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import manyhands
from tests.docs.pages import ROOT, blocks
from tests.e2e.command import PATIENCE_S, environment

FILES = {block.mark.removeprefix("file: "): block.text for block in blocks(ROOT / "CONTRIBUTING.md") if block.mark}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The folder that a copy of the package lies in, with one more file of each kind."""
    folder = tmp_path_factory.mktemp("copy")
    package = Path(manyhands.__file__).parent
    shutil.copytree(package, folder / "manyhands", ignore=shutil.ignore_patterns("__pycache__"))
    assert len(FILES) == 6
    for place, text in FILES.items():
        file = folder / "manyhands" / place
        assert file.parent.is_dir()
        assert not file.exists()
        file.write_text(text)
    return folder


@pytest.fixture
def command(copy, tmp_path):
    """Runs the copy's command in an empty folder."""

    def run(*arguments, code=0):
        ended = subprocess.run(
            [sys.executable, "-m", "manyhands", *map(str, arguments)],
            cwd=tmp_path, env=environment(PYTHONPATH=str(copy)), capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    return run


TRAIN = ("train", "plain", "oneline", "--device", "cpu", "--epochs", "4", "--batch", "20", "--set", "run.report=false")


def plan_of(run):
    return json.loads((run / "plan.json").read_text())


def test_a_data_set_and_a_network(command, tmp_path):
    command(*TRAIN, "--out", "run")
    assert "plain" in (tmp_path / "run" / "job.toml").read_text()


def test_a_mode_and_a_sync_method_with_an_option_of_its_own(command, tmp_path):
    command(
        *TRAIN, "-n", "2", "--parallel", "plain_ddp", "--sync", "scaled", "--set", "sync.factor=0.5", "--out", "run"
    )
    plan = plan_of(tmp_path / "run")
    assert (plan["mode"], plan["sync"]["method"]) == ("plain_ddp", "scaled")
    assert any("sync.method = scaled" in one for one in plan["exceptions"])
    assert "factor = 0.5" in (tmp_path / "run" / "job.toml").read_text()


@pytest.mark.slow
def test_what_a_method_needs_decides_who_takes_it(command):
    said = command(*TRAIN, "-n", "2", "--parallel", "fsdp", "--sync", "scaled", "--out", "run", code=2)
    assert "fsdp can't be combined with --sync scaled" in said
    said = command(*TRAIN, "-n", "2", "--parallel", "plain_ddp", "--sync", "bf16", "--out", "run", code=2)
    assert "plain_ddp can't be combined with --sync bf16" in said
    assert "which needs a parallel mode whose gradient averaging accepts a hook" in said
    command(*TRAIN, "-n", "2", "--parallel", "plain_ddp", "--sync", "powersgd", "--out", "other")


def test_each_is_suggested_and_shown(command):
    assert "scaled" in command("train", "plain", "--sync", "scalde", code=2)
    assert "plain_ddp" in command("train", "plain", "--parallel", "plain_dpd", code=2)
    assert "sync.factor" in command("train", "plain", "--set", "sync.facter=1", code=2)


def test_a_cluster_format(command, tmp_path):
    (tmp_path / "cluster").write_text("machine n1 with 2\nmachine n2 with 4\n")
    command("explain", "--cluster", "cluster", "--write", "hosts")
    assert (tmp_path / "hosts").read_text() == "n1 slots=2\nn2 slots=4\n"


def test_a_check_of_the_doctor(command):
    assert "the run has one machine" in command("doctor")
