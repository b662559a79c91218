"""A folder that others may write to: nothing of it runs because a command was given there."""

import json
import os
import re
import subprocess
import sys

import pytest
from PIL import Image

import manyhands
from manyhands.cluster.agents.ssh import agent_script
from manyhands.cluster.code_files import files_of_git
from manyhands.config.job import ClusterOptions
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.user_code import git_revision
from manyhands.run.folder import announce_resumed, announce_ssh_command
from manyhands.run.registry import save_ssh_options
from manyhands.run.tasks import evaluate_run, predict_files
from tests.e2e.command import done, environment, fit, inside, start

OTHERS = pytest.mark.skipif(os.getuid() != 0, reason="NOT SHOWN what another user's folder may do: only root makes one")
MODULES = ("manyhands", "torch", "json", "multiprocessing", "typing", "dill", "matplotlib")


@pytest.fixture
def planted(here):
    """Modules in the current folder that leave a mark where they are imported; gives where the mark would be."""
    mark = here / "mark"
    for name in MODULES:
        (here / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ran\\n')\nraise SystemExit(9)\n")
    return mark


def given_away(*paths):
    """Makes files and folders another user's."""
    for path in paths:
        os.chown(path, 12345, 12345)


@pytest.mark.slow
def test_modules_of_the_current_folder_are_not_imported(planted, here):
    done("train digits mlp -n 2 --epochs 1 --out r", program=("-P", "-m", "manyhands"), by=start)
    assert not planted.exists(), planted.read_text()
    # Without -P this module alone is found there.
    (here / "manyhands.py").unlink()
    done("train digits mlp --dry-run", by=start)
    assert not planted.exists(), planted.read_text()


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
    assert "from .venv: -P -m manyhands.cluster.agents.agent" in said.stdout
    if os.getuid() == 0:
        os.chown(here / ".venv", 1, 1)
        script = script.replace("python3 python", "true")
        said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        assert "from .venv" not in said.stdout


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
    (here / "inner").mkdir()
    assert re.fullmatch("[0-9a-f]{4,}", git_revision(here))
    assert git_revision(here / "inner") == git_revision(here)
    assert {path.name for path in files_of_git(here) or ()} >= {"a.py", ".gitattributes", "program"}
    assert not (here / "mark").exists()
    assert git_revision(here.parent) == ""
    assert files_of_git(here.parent) is None


@pytest.fixture
def strange_run(here):
    """Somebody's run folder: its machines are elsewhere, and its job.toml says how to reach them."""
    folder = RunFolder(here / "run")
    (folder.ranks).mkdir(parents=True)
    folder.job.write_text(f'[cluster]\nssh = "touch {here}/mark; :"\npython = "/x/evil"\n')
    folder.machines.write_text(json.dumps([{"host": "n1", "ranks": [0, 1], "folder": "/run", "local": False}]))
    return folder


def logs(*settings):
    ended = done("logs run", *settings, by=inside)
    return ended.out + ended.err


def test_logs_never_execute_what_a_run_folder_says_but_what_this_users_launch_did(strange_run, here):
    said = logs("--set cluster.ssh=/bin/false")
    assert "ignoring cluster.python of the run folder; to use this value, add --set cluster.python=/x/evil" in said
    assert "cluster.ssh," not in said
    said = logs("--set cluster.python=python3 --set cluster.workdir=/")
    assert "ignoring cluster.ssh of" in said
    program = here / "ssh-of-mine"
    program.write_text(f"#!/bin/sh\ntouch {here}/mine\nexit 255\n")
    program.chmod(0o755)
    save_ssh_options(strange_run.path, {"ssh": str(program), "python": "", "workdir": ""})
    logs()
    assert (here / "mine").exists()
    assert not (here / "mark").exists()


@OTHERS
@pytest.mark.parametrize("line", ["resume run", "doctor run/job.toml", "train run/job.toml"])
def test_another_users_job_file_does_not_choose_how_machines_are_reached(strange_run, here, line, capsys):
    strange_run.job.write_text(
        f'[cluster]\nssh = "touch {here}/mark; :"\nhosts = ["192.0.2.1"]\n'
        "[data]\nname='digits'\n[model]\nname='mlp'\n"
    )
    given_away(strange_run.path, *strange_run.path.rglob("*"))
    err = done(line, by=inside, code=2).err
    assert "run/job.toml belongs to another user (uid 12345)" in " ".join(err.split())
    assert not (here / "mark").exists()
    os.chown(strange_run.job, 0, 0)
    announce_ssh_command(load_job({}, file=strange_run.job))
    assert f"touch {here}/mark; :', as specified in {strange_run.job}" in capsys.readouterr().err
    given_away(strange_run.job)
    announce_ssh_command(load_job({"cluster.ssh": "ssh"}, file=strange_run.job))


NETWORK = """
from pathlib import Path

from torch import nn

with Path("ran").open("a") as file:
    file.write("x")

def make(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))
"""


@pytest.fixture
def run_with_code(here):
    """A run whose network is in a file of code; what that file has written is gone again."""
    (here / "net.py").write_text(NETWORK)
    run = fit("net.py:make", "synthetic:30x1x4x4x3", out=here / "run")
    forget(here)
    return run.path


def forget(here):
    """So that the file runs again where it is asked for."""
    (here / "ran").unlink()
    sys.modules.pop("net", None)


def test_code_named_by_a_run_is_announced_with_whether_it_changed(run_with_code, here, capsys):
    manyhands.load(run_with_code)
    (said,) = capsys.readouterr().err.splitlines()
    assert f"running code from {here}/net.py, as " in said
    assert said.endswith(" requests; unchanged since training")
    forget(here)
    (here / "net.py").write_text(NETWORK + "# mended\n")
    manyhands.load(run_with_code)
    assert "requests; CHANGED since training" in capsys.readouterr().err
    forget(here)
    manyhands.load(run_with_code, model="net.py:make")
    assert not capsys.readouterr().err


@OTHERS
def test_another_users_folder_does_not_choose_the_code_that_runs(run_with_code, here):
    picture = here / "a.png"
    Image.new("L", (4, 4)).save(picture)
    given_away(run_with_code, *run_with_code.rglob("*"))
    calls = (
        lambda: list(predict_files(run_with_code, [picture])),
        lambda: manyhands.load(run_with_code),
        lambda: evaluate_run(run_with_code, which="best", flags={}),
        lambda: announce_resumed(RunFolder(run_with_code), load_job({}, file=run_with_code / "job.toml")),
    )
    refusal = r"requests to run net\.py:make, but .* belongs to another user \(uid 12345\)"
    for call in calls:
        with pytest.raises(UserError, match=refusal):
            call()
    assert not (here / "ran").exists()
    assert list(predict_files(run_with_code, [picture], model="net.py:make"))


@pytest.mark.slow
def test_code_named_by_a_plan_is_announced_and_refused_from_other_users(here):
    (here / "net.py").write_text(NETWORK)
    done("plan synthetic:30x1x4x4x3 net.py:make -n 2 --no-measure")
    done("plan plan.json", says=f"running code from {here}/net.py, as plan.json requests")
    if os.getuid():
        pytest.skip("NOT SHOWN what another user's plan may do: only root can make one")
    (here / "ran").unlink()
    given_away(here / "plan.json")
    err = done("plan plan.json", code=2).err
    assert "plan.json requests to run net.py:make, but plan.json belongs to another user (uid 12345)" in err
    assert not (here / "ran").exists()
