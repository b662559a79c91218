"""The digits on two processes, under each launcher and each description of machines: one run, one result."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from manyhands.config.load import load_job
from manyhands.core.errors import EXIT_SAVED
from manyhands.run.submit import submit
from tests.data.sets import make
from tests.e2e.command import QUICK, environment, events, finish, processes_of, typed, wait_until
from tests.e2e.conftest import here as here
from tests.launchers.slurm import NoSlurm, Slurm

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def slurm():
    # Sockets have short names, and pytest's folders long ones.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        try:
            found = Slurm(Path(folder))
        except NoSlurm as error:
            pytest.skip(f"no Slurm here: {error}")
        yield found
        found.stop()


MANYHANDS = [sys.executable, "-m", "manyhands"]
JOB = ["train", "digits", "mlp", "--epochs", "1", "--out", "run", "--device", "cpu", *QUICK]


def assert_one_run_of_two(ended, folder):
    """Two processes, one result, and one process that spoke."""
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert processes_of(folder / "run") == 2
    assert ended.stdout.count("best and final") == 1
    assert len(events(folder / "run", "finished")) == 1


# With --cpu alone, accelerate always starts one process; --multi_gpu starts several on CPUs too.
ACCELERATED = "--multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 --mixed_precision no"
LAUNCHERS = {
    "mpirun": ["mpirun", *["--allow-run-as-root"] * (os.geteuid() == 0), "-n", "2", "--oversubscribe", *MANYHANDS],
    "accelerate": ["accelerate", "launch", *ACCELERATED.split(), "--dynamo_backend", "no", "-m", "manyhands"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_of_a_launcher_are_one_run(launcher, here):
    variables = typed(HF_HOME=str(here))
    if not shutil.which(launcher, path=variables["PATH"]):
        pytest.skip(f"{launcher} is not installed (Debian: openmpi-bin; pip install accelerate)")
    command = [*LAUNCHERS[launcher], *JOB]
    ended = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=240, check=False
    )
    assert_one_run_of_two(ended, here)


@pytest.mark.slow
def test_a_batch_script_and_the_shell_of_salloc_need_srun(slurm, here):
    command = " ".join([*MANYHANDS, *JOB])
    lines = [f"{command} 2>without.out; echo $? >>without.out", "[ ! -e run ] || exit 9", f"srun {command}"]
    (here / "job.sh").write_text("\n".join(["#!/bin/bash", "#SBATCH -n 2", "#SBATCH -o said.out", *lines]))
    ended = slurm.run("sbatch", "--wait", "job.sh", env=environment())
    ended.stdout = (here / "said.out").read_text()
    assert_one_run_of_two(ended, here)
    without = (here / "without.out").read_text()
    assert without.endswith("\n2\n")
    assert all(words in without for words in ("has 2 tasks, but only one runs without srun", "srun manyhands train"))
    for more, code in ([], 2), (["-n", "1"], 0):  # in the shell of salloc too
        ended = slurm.run("salloc", "-n", "2", *MANYHANDS, "explain", *more, env=environment())
        assert ended.returncode == code, ended.stderr
        assert ("only one runs without srun" in ended.stderr) == (code == 2)


def test_sbatch_takes_the_script(slurm):
    flags = {"submit.nodes": 1, "cluster.processes": 2, "submit.time_limit": "10", "submit.options": ["--comment=x"]}
    text = submit(load_job(flags, environment={}).job, None, "slurm", dry_run=True)
    taken = slurm.run("sbatch", "--test-only", input=text)
    assert taken.returncode == 0, taken.stderr
    refused = slurm.run("sbatch", "--test-only", input=text.replace("--comment=x", "--partition=nowhere"))
    assert refused.returncode != 0


@pytest.mark.slow
def test_submitted_job_saves_on_request_and_resumes(slurm, here, monkeypatch):
    """The signal that Slurm sends before the time limit, sent by hand; the second turn ends the run."""
    path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    for name, value in {**slurm.environment, "PATH": path}.items():
        monkeypatch.setenv(name, value)
    flags = {"cluster.processes": 2, "cluster.device": "cpu", "train.epochs": 20, "run.report": False}
    flags["model.name"] = "cnn"
    number = submit(load_job(flags, environment={}).job, None, "slurm", dry_run=False).split()[-1]
    folder = here / "runs" / f"slurm-{number}"
    wait_until(lambda: (folder / "metrics.jsonl").exists())
    slurm.run("scancel", "--signal=TERM", number)
    wait_until(lambda: "finished" in [event["kind"] for event in events(folder)])
    kinds = [event["kind"] for event in events(folder)]
    assert kinds.count("stopped") == 1
    assert kinds.count("started") == 2
    wait_until(lambda: "COMPLETED" in slurm.run("scontrol", "show", "job", number).stdout)


@pytest.mark.slow
def test_srun_ends_with_the_code_for_another_turn_where_slurm_asks_by_sigusr1(slurm, here):
    """As `#SBATCH --signal=USR1@60` does: each process of the step hears it, those that decode pictures too."""
    make(here / "pictures", count=20, size=(10, 10))
    job = ["train", "pictures", "mlp", "--data.image-size", "10", "--batch", "4", "--epochs", "100000", "--out", "run"]
    decoding = ["--device", "cpu", "--lr", "1e-6", "--data.workers", "1", "--set", "data.memory_limit_mib=0", *QUICK]
    command = ["srun", "-n", "2", *MANYHANDS, *job, *decoding]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(**slurm.environment), **pipes)
    try:
        wait_until(lambda: events("run", "first-step"), process)
        asked = time.time()
        slurm.run("scancel", "--signal=USR1", "--user", "root")
        ended = finish(process)
    finally:
        process.kill()
    assert ended.code == EXIT_SAVED, ended.err
    (stopped,), saved = events("run", "stopped"), events("run", "saved")[-1]
    assert saved["step"] == stopped["step"]
    print(f"saved {saved['time'] - asked:.2f} s after it was asked to")
