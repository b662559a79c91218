"""Under other launchers: torchrun, torch.distributed.launch, Ray Train, and nodes that meet by a file."""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from manyhands.report.read import read_run
from tests.e2e.command import NETS, QUICK, done, finish, free_port, processes_of, read, start, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"
LAUNCH = "-m torch.distributed.launch --nproc-per-node 2"


def launched(program, *given, **expected):
    port = "" if "standalone" in program else f"--master-port {free_port()}"
    return done(*given, program=f"{program} {port}".split(), by=start, **expected)


@pytest.mark.parametrize("program", [TORCHRUN, LAUNCH, f"{LAUNCH} --use-env"])
def test_two_processes_are_one_run(program):
    ended = launched(program, "-m manyhands train digits mlp --epochs 2 --out run --json", QUICK)
    (line,) = ended.out.splitlines()
    assert json.loads(line)["run"].endswith("run")
    assert processes_of("run") == 2
    assert ended.err.count("evaluated=360") == 2
    assert ended.err.count("itself listens on every interface, port ") == 1
    (line,) = launched(program, "-m manyhands eval run --json").out.splitlines()
    assert json.loads(line)["count"] == 360


def test_a_failure_under_torchrun_is_told():
    ended = launched(TORCHRUN, f"-m manyhands train digits {NETS}:Raises --out run", QUICK, code=1)
    assert 'KeyError: "the user\'s own mistake"' in ended.err
    assert "manyhands: " in ended.err
    assert Path("run/ranks/failures/1.json").exists()


# The older of both launchers passes --local-rank to the script.
OWN = """
import argparse
import sys
import torch
import manyhands
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int)
parser.parse_args()
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
run = manyhands.fit(net, "digits", epochs=1, quiet=True, out="run", run__report=False)
sys.stdout.write(f"{run.status} {run.best.top1}\\n")
"""


@pytest.mark.parametrize("program", [TORCHRUN, LAUNCH])
def test_every_process_of_a_fit_has_the_run(program):
    Path("own.py").write_text(OWN)
    first, second = sorted(launched(program, "own.py").out.splitlines())
    assert first == second
    assert first.startswith("finished 0.")
    assert processes_of("run") == 2


# Nodes of several processes each meet by a file on a shared disk, as main.py's do with --dist-url file://…

# What `manyhands imagenet --multiprocessing-distributed` does where it finds two accelerators; here they are processes.
NODE = """
import sys

from manyhands.cli.imagenet import ImagenetFlags, nodes_of, rendezvous_of
from manyhands.config.load import load_job
from manyhands.core.errors import ManyhandsError
from manyhands.run.train import train

if __name__ == "__main__":
    node, url, batch, epochs = sys.argv[1:]
    values = {"data.name": "digits", "model.name": "mlp", "train.epochs": int(epochs), "train.batch": int(batch),
              "run.out": "run", "run.report": False, "cluster.device": "cpu", "data.workers": 0}
    flags = ImagenetFlags(world_size=2, rank=int(node), dist_url=url, multiprocessing_distributed=True)
    try:
        rendezvous = rendezvous_of(nodes_of(flags, {}), 2)
        sys.exit(train(load_job(values, environment={}).job, rendezvous=rendezvous).exit_code)
    except ManyhandsError as error:
        sys.exit(str(error))
"""


def begun(here, *batches, epochs=1):
    url = f"file://{here}/meet"
    return [start(n, url, batch, epochs, program=("-c", NODE)) for n, batch in enumerate(batches)]


def test_two_nodes_of_two_processes_meet_by_a_file_and_train_as_one(here):
    for each in [finish(by) for by in begun(here, 64, 64)]:
        assert each.code == 0, each.err
    assert processes_of("run") == 4
    assert read_run(here / "run").evaluations[-1].top1 > 0.5
    assert not (here / "meet").exists()


def test_nodes_that_differ_say_in_what(here):
    for each in [finish(by) for by in begun(here, 64, 32)]:
        assert each.code
        assert "differ in the job (flags or job.toml): train.batch (" in each.err


def test_a_process_that_was_stopped_for_a_while_goes_on_where_nobody_could_start_it_again(here):
    training = begun(here, 64, 64, epochs=200)
    wait_until((here / "run" / "metrics.jsonl").is_file, training[0])
    time.sleep(4)  # who hasn't been seen to train isn't ended
    stopped = read("run/env.json")["ranks"][1]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(22)  # a run that starts its processes again would have ended it after 15
    os.kill(stopped, signal.SIGCONT)
    for each in [finish(by) for by in training]:
        assert each.code == 0, each.err


# Inside Ray Train's TorchTrainer, with a real Ray: its process group is used and stays.
TRAINER = """\
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    import torch
    import torch.distributed as dist

    import manyhands

    group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    run = manyhands.fit("mlp", "digits", epochs=1, out=config["out"], run__report=False)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    samples = torch.utils.data.TensorDataset(torch.randn(40, 64), torch.arange(40) % 10)
    assert manyhands.evaluate(net, samples).count == 40
    with manyhands.session() as here:
        assert (here.rank, here.size) == (ray.train.get_context().get_world_rank(), 2)
    assert dist.group.WORLD is group
    assert dist.distributed_c10d._get_default_store() is store
    total = torch.ones(1)
    dist.all_reduce(total)
    with open(f"{config['out']}-{dist.get_rank()}.txt", "w") as file:
        file.write(f"{total.item()} {run.status}")


ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[2])
trainer = TorchTrainer(
    train,
    train_loop_config={"out": sys.argv[1]},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=sys.argv[1] + "-ray"),
)
trainer.fit()
"""


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ray", "pandas", "pyarrow")),
    reason='NOT SHOWN inside Ray Train: pip install "ray[train]"',
)
def test_torch_trainers_processes_train_together(tmp_path, tmp_path_factory):
    Path("trainer.py").write_text(TRAINER)
    # Ray's sockets lie there, and their paths are limited to 107 characters.
    short = Path(tmp_path_factory.getbasetemp()).parent / "ray"
    own = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1"}
    own["PYTHONPATH"] = os.pathsep.join(sys.path)  # Ray's workers are started elsewhere
    done(tmp_path / "run", short, program=("trainer.py",), by=start, **own)
    assert [Path(f"run-{rank}.txt").read_text() for rank in (0, 1)] == ["2.0 finished"] * 2
    assert processes_of("run") == 2
