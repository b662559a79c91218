"""The user's own training script, started by our agents as torchrun would start it, and in a group of its own."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from manyhands.cli.main import _before_separator, _without_local_rank
from manyhands.cluster.agents.mirror import OUTPUT, RecordReceiver, RecordSender
from manyhands.core.run_folder import RunFolder
from manyhands.run.train import ScriptOutput
from tests.e2e.command import done, forked, processes_of, refused, start, stop, training, wait_until

SCRIPT = """\
import argparse
import os
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--fail", type=int, default=-1)
parser.add_argument("--sleep", action="store_true")
parser.add_argument("words", nargs="*")
given = parser.parse_args()
if given.sleep:
    print("asleep", flush=True)
    time.sleep(600)

import torch
import torch.distributed as dist

import beside

dist.init_process_group("gloo")
rank = dist.get_rank()
print(__name__, beside.WORD, rank, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], *given.words)
if rank == given.fail:
    raise ValueError("the loss is gone")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item())
"""
# What a script's own group is worth to it: before, between and after fit, evaluate and session.
GROUP = """\
import sys

import torch
import torch.distributed as dist

import manyhands

dist.init_process_group(*sys.argv[1:])
group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
store.set("own", "word")

def stands():
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    assert dist.group.WORLD is group
    assert dist.distributed_c10d._get_default_store() is store
    assert store.get("own") == b"word"
    assert len(dist.distributed_c10d._world.pg_map) == 1

torch.manual_seed(0)
body = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32)]
net = torch.nn.Sequential(*body, torch.nn.Linear(32, 10))
for out in ("first", "second"):
    run = manyhands.fit(net, "digits", epochs=1, out=out, quiet=True, run__report=False, sync__method="bf16")
    stands()
images, labels = torch.randn(40, 64), torch.arange(40) % 10
samples = torch.utils.data.TensorDataset(images, labels)
found = manyhands.evaluate(net, samples)
stands()
with manyhands.session() as here:
    assert (here.rank, here.size) == (dist.get_rank(), dist.get_world_size())
    pair = here.new_group(list(range(here.size)))
stands()
for mistake, words in (({"batch": 8, "no_such": 1}, "no_such"), ({"processes": 2}, "already in a process group")):
    try:
        manyhands.fit(net, samples, **mistake)
    except manyhands.ManyhandsError as error:
        assert words in str(error)
        stands()
    else:
        raise AssertionError
print(dist.get_rank(), run.status, found.count, flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def scripts(here):
    Path("own").mkdir()
    Path("own/train.py").write_text(SCRIPT)
    Path("own/beside.py").write_text("WORD = 'found'\n")
    Path("group.py").write_text(GROUP)


def log(rank, folder="run"):
    return Path(folder, "ranks", f"{rank}.log").read_text()


@pytest.mark.slow
def test_a_script_runs_as_under_torchrun():
    words = ["--", "--fail=-1", "--", "a b", "${local_rank}", "$$1", "--train.lr"]
    # As clusters' shells do; on one machine nobody else is to be reached.
    ended = done("train own/train.py -n 2 --out run --json", words, GLOO_SOCKET_IFNAME="eth7")
    first = "__main__ found 0 0 2 a b 0 $$1 --train.lr\nsum 2.0\n"
    assert log(0) == first
    assert log(1) == "__main__ found 1 1 2 a b 1 $$1 --train.lr\nsum 2.0\n"
    assert ended.out.startswith(first)
    assert json.loads(ended.out.splitlines()[-1]) == {"run": "run", "status": "finished", "exit_code": 0}


@pytest.mark.slow
def test_first_cause_and_refusals_are_reported():
    ended = done("train own/train.py -n 2 --out run -q -- --fail 1", code=1)
    for text in ("manyhands: ValueError: the loss is gone", "where: rank 1 on", 'raise ValueError("the loss is gone")'):
        assert text in ended.err
    assert "worker/script" not in ended.err
    assert "Traceback" in log(1)
    # What the script itself refuses is in its log.
    ended = done("train own/train.py -n 1 --out other -- --nonsense", code=1)
    assert "rank 0 ended with exit code 2" in ended.err
    assert "unrecognized arguments: --nonsense" in ended.err
    done("train own/train.py -n 2 --debug-rank 2", code=2, says="there is no rank 2 to debug: the ranks are 0 … 1")


def test_ctrl_c_ends_all_of_it():
    with training("train own/train.py -n 2 --out run -- --sleep") as process:
        wait_until(lambda: all(Path(f"run/ranks/{rank}.log").is_file() and log(rank) for rank in (0, 1)), process)
        stop(process, signal.SIGINT, code=130, says="own/train.py was stopped")


def test_under_a_launcher_the_script_itself_is_to_be_started():
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    refused("train own/train.py", says="this process is already rank 0 of 2", by=forked, **variables)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "backend"), [(2, "gloo"), (1, "")])
def test_a_scripts_own_group_is_used_and_stays(processes, backend):
    done("train group.py -n", processes, "--out run --", backend)
    for rank in range(processes):
        assert log(rank).endswith(f"{rank} finished 40\n")
    assert processes_of("first") == processes


def test_words_behind_the_dashes_are_left_alone():
    given = ["train", "--local-rank=1", "train.py", "--", "--local_rank=0", "--json"]
    assert _without_local_rank(given) == ["train", "train.py", "--", "--local_rank=0", "--json"]
    assert "--json" not in _before_separator(given)


def test_output_without_line_ends_comes_from_another_machine_too(tmp_path):
    there, here = RunFolder(tmp_path / "there"), RunFolder(tmp_path / "here")
    for folder in (there, here):
        folder.ranks.mkdir(parents=True)
    receiver = RecordReceiver(here.path)
    sender = RecordSender(there.path, receiver.file_sizes(), output=True)
    log = there.path / OUTPUT
    written = b""
    for piece in (b"epoch 1\n", "\r 10 %|███".encode()[:-1], "█".encode()[-1:] + b"| it/s", b"\nlast words"):
        written += piece
        log.write_bytes(written)
        for news in sender.new_pieces():
            receiver.write_piece(news)
        assert (here.path / OUTPUT).read_bytes() == written


def test_a_script_that_writes_without_a_pause_holds_nothing_up(tmp_path, monkeypatch):
    log = tmp_path / "0.log"
    echo = ScriptOutput(log)
    log.write_bytes(b"x" * 10)
    shown = []

    def write(_descriptor, content):
        assert len(shown) < 5, "it never returns"
        shown.append(bytes(content))
        with log.open("ab") as script:
            script.write(b"y" * 10)

    monkeypatch.setattr("manyhands.core.files.write_all", write)
    echo.show_new()
    echo.show_new()
    assert b"".join(shown) == b"x" * 10 + b"y" * 10


# Inside Ray Train's TorchTrainer, with a real Ray, whose process group is used and stays.
TRAINER = """\
import os
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def train(config):
    os.chdir(config["here"])
    exec(config["body"], {})

ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[2])
body, given = open("group.py").read().split("dist.init_process_group(*sys.argv[1:])"), {"here": os.getcwd()}
given["body"] = "".join(body).replace("dist.destroy_process_group()", "")
run_config = RunConfig(storage_path=sys.argv[1])
TorchTrainer(train, train_loop_config=given, scaling_config=ScalingConfig(num_workers=2), run_config=run_config).fit()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torch_trainers_processes_train_together(here, tmp_path_factory):
    for name in ("ray", "pandas", "pyarrow"):
        pytest.importorskip(name, reason='NOT SHOWN inside Ray Train: pip install "ray[train]"')
    Path("trainer.py").write_text(TRAINER)
    # Ray's sockets lie there, and their paths are limited to 107 characters.
    short = Path(tmp_path_factory.getbasetemp()).parent / "ray"
    own = {"HOME": str(here), "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1"}
    own["PYTHONPATH"] = os.pathsep.join(sys.path)  # Ray's workers are started elsewhere
    done(here / "ray", short, program=("trainer.py",), by=start, **own)
    assert [processes_of(name) for name in ("first", "second")] == [2, 2]
