"""A folder that others may write to: nothing of it runs because a command was given there."""

import os
import subprocess
import sys

import pytest

from manyhands.cluster.ssh import agent_script
from manyhands.config.job import ClusterOptions
from manyhands.config.load import load_job
from manyhands.core.git import listed_files, revision
from tests.e2e.command import QUICK, environment, finish, run, start

MODULES = ("manyhands", "torch", "json", "multiprocessing", "typing", "dill", "matplotlib")


@pytest.fixture
def planted(here):
    """Modules in the current folder that leave a mark where they are imported; gives where the mark would be."""
    mark = here / "mark"
    for name in MODULES:
        (here / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ran\\n')\nraise SystemExit(9)\n")
    return mark


def test_modules_of_the_current_folder_are_not_imported(planted):
    program = ("-P", "-m", "manyhands")
    ended = finish(start("train", "digits", "mlp", "-n", 2, "--epochs", 1, "--out", "r", program=program))
    assert ended.code == 0, ended.err
    assert not planted.exists(), planted.read_text()


def test_python_dash_m_takes_the_package_alone_from_there(here):
    (here / "torch.py").write_text("raise SystemExit(9)")
    (here / "pydantic.py").write_text("raise SystemExit(9)")
    ended = run("train", "digits", "mlp", "--dry-run")
    assert ended.code == 0, ended.err


def test_an_agent_that_ssh_starts_takes_nothing_from_its_work_folder(planted, here):
    for python in ("", sys.executable):
        script = agent_script(ClusterOptions(python=python), here)
        done = subprocess.run(["sh", "-c", script], stdin=subprocess.DEVNULL, env=environment(), check=False)
        assert done.returncode == 0
    assert not planted.exists(), planted.read_text()


def test_an_environment_in_the_work_folder_counts_where_it_is_this_users_own(here):
    (here / ".venv" / "bin").mkdir(parents=True)
    python = here / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\necho from .venv: $*\n")
    python.chmod(0o755)
    script = agent_script(ClusterOptions(), here).replace(sys.executable, "/nowhere/python")
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert "from .venv: -P -m manyhands.cluster.host" in said.stdout
    if os.getuid() == 0:
        os.chown(here / ".venv", 1, 1)
        script = script.replace("python3 python", "true")
        said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        assert "from .venv" not in said.stdout


def test_the_users_own_files_find_what_lies_beside_them_and_in_the_current_folder(here):
    (here / "common.py").write_text("WIDTH = 8\n")
    (here / "nets").mkdir()
    (here / "nets" / "layers.py").write_text("from common import WIDTH\n")
    (here / "nets" / "mine.py").write_text(
        "from torch import nn\nfrom layers import WIDTH\n\n\ndef make(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(WIDTH), nn.ReLU(), nn.Linear(WIDTH, num_classes))\n"
    )
    ended = run("train", "digits", "nets/mine.py:make", "--epochs", 1, *QUICK, program=("-P", "-m", "manyhands"))
    assert ended.code == 0, ended.err


def test_a_recipe_comes_with_the_program_and_never_from_beside_the_data(here):
    (here / "pets").mkdir()
    (here / "pets.toml").write_text('[cluster]\nssh = "touch mark"\n[model]\nname = "/x/evil.py:Net"\n')
    for name in (str(here / "pets"), "./pets", "pets", f"{here}/pets:x"):
        loaded = load_job({"data.name": name})
        assert (loaded.job.cluster.ssh, loaded.job.model.name) == ("ssh", load_job({"data.name": "."}).job.model.name)


def test_git_runs_no_program_that_the_folder_names(here):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    program = here / "program"
    program.write_text(f"#!/bin/sh\ntouch {here}/mark\ncat\n")
    program.chmod(0o755)
    git("init", "-q", ".")
    (here / "a.py").write_text("a = 1\n")
    git("add", "a.py")
    git("commit", "-qm", "first")
    (here / ".gitattributes").write_text("*.py filter=x\n")
    git("config", "core.fsmonitor", str(program))
    git("config", "filter.x.clean", str(program))
    (here / "a.py").touch()
    plain = revision(here)
    assert plain
    assert not plain.endswith("+")
    (here / "a.py").write_text("a = 2\n")
    (here / "inner").mkdir()
    assert revision(here) == revision(here / "inner") == f"{plain}+"
    assert {path.name for path in listed_files(here) or ()} >= {"a.py", ".gitattributes", "program"}
    assert not (here / "mark").exists()
    assert revision(here.parent) == ""
    assert listed_files(here.parent) is None
