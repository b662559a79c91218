"""Under other launchers: torchrun, and torch.distributed.launch with both of its spellings."""

import json

import pytest

from tests.e2e.command import NETS, QUICK, free_port, run

pytestmark = pytest.mark.timeout(300)
JOB = ["train", "digits", "mlp", "--epochs", "2", "--out", "run", *QUICK]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "manyhands"],
        pytest.param(
            ["-m", "torch.distributed.launch", "--nproc-per-node", "2", "-m", "manyhands"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["-m", "torch.distributed.launch", "--nproc-per-node", "2", "--use-env", "-m", "manyhands"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["torchrun", "launch", "launch-use-env"],
)
def test_two_processes_are_one_run(program, here):
    port = [] if "--standalone" in program else ["--master-port", str(free_port())]
    ended = run(*JOB, "--json", program=[*program[:2], *port, *program[2:]])
    assert ended.code == 0, ended.err
    (line,) = ended.out.splitlines()
    assert json.loads(line)["run"].endswith("run")
    assert json.loads((here / "run" / "env.json").read_text())["processes"] == 2
    assert ended.err.count("evaluated=360") == 2
    assert ended.err.count("itself listens on every interface, port ") == 1
    ended = run("eval", "run", "--json", program=[*program[:2], *port, *program[2:]])
    assert ended.code == 0, ended.err
    (line,) = ended.out.splitlines()
    assert json.loads(line)["count"] == 360


@pytest.mark.slow
def test_a_failure_under_torchrun_is_told(here):
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "manyhands"]
    ended = run(*JOB[:2], f"{NETS}:Raises", *JOB[3:], program=program)
    assert ended.code == 1
    assert 'KeyError: "the user\'s own mistake"' in ended.err
    assert "manyhands: " in ended.err
    assert (here / "run" / "ranks" / "failures" / "1.json").exists()


@pytest.mark.slow
def test_every_process_of_a_fit_has_the_run(here):
    (here / "own.py").write_text(
        "import torch, manyhands\n"
        "net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
        "run = manyhands.fit(net, 'digits', epochs=1, quiet=True, out='run', run__report=False)\n"
        "import sys; sys.stdout.write(f'{run.status} {run.best.top1}\\n')\n"
    )
    ended = run(program=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "own.py"])
    assert ended.code == 0, ended.err
    first, second = sorted(ended.out.splitlines())
    assert first == second
    assert first.startswith("finished 0.")
