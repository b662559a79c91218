"""What is cleaned, and what never is."""

import json
import os
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from manyhands.cluster.agents.folders import claim_run_folder
from manyhands.core.run_folder import RunFolder
from manyhands.run import disk
from tests.e2e.command import done, inside


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home, a temporary folder, and a work folder of its own; only this test's processes count."""
    for name, variable in (("cache", "XDG_CACHE_HOME"), ("state", "XDG_STATE_HOME"), ("tmp", "TMPDIR")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.delenv("MANYHANDS_CACHE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    ours, before = disk._is_manyhands_process, psutil.Process().children()
    mine = lambda: {child.pid for child in psutil.Process().children() if child not in before}  # noqa: E731
    monkeypatch.setattr(disk, "_is_manyhands_process", lambda process: process.pid in mine() and ours(process))
    yield tmp_path
    tempfile.tempdir = None


def put(*path, old=True):
    """A file of 5,000 bytes in folders of its own, two days old."""
    (file := path[0].joinpath(*path[1:])).parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(5000))
    if old:
        for each in (file, file.parent):
            os.utime(each, (time.time() - 2 * 86400,) * 2)
    return file


@pytest.fixture
def litter(home):
    cache = home / "cache" / "manyhands"
    put(home, "work", "runs", "first", "ranks", "0.log")
    (home / "work" / "runs" / "first" / "job.toml").touch()
    return {
        "goes": [
            put(cache, "code", "0123", "net.py"),
            put(cache, "compiled", "fxgraph", "a.so"),
            put(cache, "decoded", "a.npy"),
            put(cache, "unpacked", "b", "c.png"),
            put(cache, "data", ".x.gz.99.part"),
            put(home, "tmp", "manyhands-agent-a1b2c3d4", "0.json"),
        ],
        "stays": [
            put(cache, "data", "mnist", "train.gz"),
            put(cache, "data", ".y.gz.99.part", old=False),
            put(cache, "planner", "ops-1.json"),
            put(home, "tmp", "manyhands-mine", "file"),
            put(home, "tmp", "manyhands-agent-new12345", "0.json", old=False),
            home / "work" / "runs" / "first" / "ranks" / "0.log",
        ],
    }


@pytest.mark.slow
def test_first_it_is_said_and_then_it_goes(litter, home):
    everything = [*litter["goes"], *litter["stays"]]
    out = done("clean", by=inside).out
    assert "can be freed; to remove the files, run manyhands clean --yes" in out
    assert all(path.exists() for path in everything)
    reported = json.loads(done("clean --json", by=inside).out)
    assert set(reported["found"]) == {"code", "compiled", "decoded", "unpacked", "parts", "temporary"}
    assert reported["bytes"] >= 6 * 5000
    assert " freed" in done("clean --yes", by=inside).out
    assert not any(path.exists() for path in litter["goes"])
    assert all(path.exists() for path in litter["stays"])
    assert done("clean", by=inside).out == "nothing to clean\n"


def test_run_is_removed_only_by_name_and_never_while_active(litter, home):
    run = home / "work" / "runs" / "first"
    lock = claim_run_folder(RunFolder(run))
    done("clean first --yes", by=inside, code=2, says="an active run can't be removed")
    assert all(path.exists() for path in [*litter["goes"], *litter["stays"]])
    lock.release()
    assert "manyhands clean first --yes" in done("clean first", by=inside).out
    assert run.exists()
    done("clean first --yes", by=inside)
    assert not run.exists()
    assert (home / "work" / "runs").exists()


def test_what_processes_work_with_and_what_links_lead_to_stays(litter, home):
    (home / "mine").mkdir()
    precious, decoded = put(home, "mine", "file"), home / "cache" / "manyhands" / "decoded"
    (decoded / "link").symlink_to(home / "mine")
    words = [sys.executable, "-c", "print(flush=True); input()", "manyhands"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, cwd=litter["goes"][0].parent, **pipes) as process:
        process.stdout.readline()
        out = done("clean --yes", by=inside).out
        assert "kept  copies of code that processes use now: 1" in out
        assert "kept  compiled networks, decoded pictures and unpacked archives" in out
        assert [path.exists() for path in litter["goes"]] == [True, True, True, True, False, False]
        process.stdin.close()
    done("clean --yes", by=inside)
    assert precious.exists()
    assert not decoded.exists() or not list(decoded.iterdir())
