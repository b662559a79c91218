"""A new data set, network, mode, sync method, cluster format or check is one file; nothing else is edited.

The examples of CONTRIBUTING.md are added to a copy of the installed package and used from the command line.
"""

import json
import shutil
from pathlib import Path

import pytest

import manyhands
from tests.docs.test_examples import ROOT, blocks
from tests.e2e.command import finish, start

FILES = {block.mark.removeprefix("file: "): block.text for block in blocks(ROOT / "CONTRIBUTING.md") if block.mark}


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs the command of a copy of the package with one more file of each kind; gives what it says."""
    folder = tmp_path_factory.mktemp("copy")
    package = Path(manyhands.__file__).parent
    shutil.copytree(package, folder / "manyhands", ignore=shutil.ignore_patterns("__pycache__"))
    assert len(FILES) == 6
    for place, text in FILES.items():
        file = folder / "manyhands" / place
        assert file.parent.is_dir()
        assert not file.exists()
        file.write_text(text)

    def run(cwd, *arguments, code=0):
        ended = finish(start(*arguments, cwd=cwd, PYTHONPATH=str(folder)))
        assert ended.code == code, ended
        return ended.out + ended.err

    return run


TRAIN = ("train", "plain", "oneline", "--device", "cpu", "--epochs", "4", "--batch", "20", "--set", "run.report=false")


def test_a_data_set_a_network_a_mode_and_a_sync_method_with_an_option_of_its_own(command, tmp_path):
    options = ("--parallel", "plain_ddp", "--sync", "scaled", "--set", "sync.factor=0.5", "--out", "run")
    command(tmp_path, *TRAIN, "-n", "2", *options)
    plan, job = (tmp_path / "run" / "plan.json").read_text(), (tmp_path / "run" / "job.toml").read_text()
    assert (json.loads(plan)["mode"], json.loads(plan)["sync"]["method"]) == ("plain_ddp", "scaled")
    assert any("sync.method = scaled" in one for one in json.loads(plan)["exceptions"])
    assert all(words in job for words in ("plain", "factor = 0.5"))


@pytest.mark.slow
def test_what_a_method_needs_decides_who_takes_it_and_each_is_suggested(command, tmp_path):
    said = command(tmp_path, *TRAIN, "-n", "2", "--parallel", "fsdp", "--sync", "scaled", "--out", "run", code=2)
    assert "fsdp can't be combined with --sync scaled" in said
    said = command(tmp_path, *TRAIN, "-n", "2", "--parallel", "plain_ddp", "--sync", "bf16", "--out", "run", code=2)
    assert "plain_ddp can't be combined with --sync bf16" in said
    assert "which needs a parallel mode whose gradient averaging accepts a hook" in said
    command(tmp_path, *TRAIN, "-n", "2", "--parallel", "plain_ddp", "--sync", "powersgd", "--out", "other")
    assert "scaled" in command(tmp_path, "train", "plain", "--sync", "scalde", code=2)
    assert "plain_ddp" in command(tmp_path, "train", "plain", "--parallel", "plain_dpd", code=2)
    assert "sync.factor" in command(tmp_path, "train", "plain", "--set", "sync.facter=1", code=2)


def test_a_cluster_format_and_a_check_of_the_doctor(command, tmp_path):
    (tmp_path / "cluster").write_text("machine n1 with 2\nmachine n2 with 4\n")
    command(tmp_path, "explain", "--cluster", "cluster", "--write", "hosts")
    assert (tmp_path / "hosts").read_text() == "n1 slots=2\nn2 slots=4\n"
    assert "the run has one machine" in command(tmp_path, "doctor")
