"""Documents 000, 002, 003 and 004 on the machines that they are about: each host runs what a reader types there."""

import contextlib
import functools
import json
import re

import pytest
import torch

from manyhands.cluster.hosts.formats import rank_table
from manyhands.cluster.hosts.inventory import Cluster, Machine
from tests.e2e.command import PIPES, assert_one_screen, events, finish, metrics, processes_of, training, typed
from tests.fork_server import fork_variables

pytestmark = pytest.mark.timeout(400)
DIGITS = "digits mlp --epochs 1 --out run"


def table_of(lab, cards):
    """A rank table of the first two hosts; tests/cluster/test_rank_table.py reads those that others write."""
    return rank_table.write(Cluster(tuple(Machine(lab.address(host), cards) for host in (1, 2))))[0]


@pytest.fixture
def type_on(lab, here):
    """Starts a line in a host, in a folder of that host's own; what still runs at the end of the test is ended."""
    with contextlib.ExitStack() as stack:

        def start(host, line, **variables):
            (folder := here / lab.name(host)).mkdir(exist_ok=True)
            options = {"cwd": folder, "env": typed(**fork_variables(), **variables)}
            begin = functools.partial(lab.exec, host, ["bash", "-c", line], **PIPES, **options)
            return stack.enter_context(training(by=begin))

        yield start


@pytest.fixture
def type_everywhere(type_on):
    """Types a line on several hosts at once; {k} in it is the host's own number from 0 on. All must end well."""

    def together(count, line):
        processes = [type_on(1 + k, line.replace("{k}", str(k))) for k in range(count)]
        ended = [finish(process) for process in processes]
        assert [each.code for each in ended] == [0] * count, "\n".join(each.err for each in ended)
        return ended

    return together


@pytest.fixture
def names_as_in_debian(lab):
    for host in lab.hosts:
        lab.set_names(host, own="127.0.1.1")


def reported(ended):
    """What `explain --json` said, a dictionary for each process."""
    return [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]


def values(explained, *keys):
    return [explained[key]["value"] for key in keys]


def evaluation(folder):
    return metrics(folder, "evaluation")[-1]


# The PyTorch two-machine script: two machines with one GPU each, MNIST.

NETWORK_OF_000 = """
import torch.nn as nn

model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10), nn.LogSoftmax(dim=1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("listens", ["its own address", "0.0.0.0"])
def test_000_two_machines_train_mnist_with_the_documents_network(
    listens, lab, names_as_in_debian, type_on, here, real_data
):
    data = str(real_data("mnist").parent)
    address = lab.address(1)
    first = "0.0.0.0" if listens == "0.0.0.0" else address
    for k in (1, 2):
        (here / f"n{k}").mkdir()
        (here / f"n{k}" / "net.py").write_text(NETWORK_OF_000)
    line = (
        "manyhands train mnist net.py:model --train.loss nll --epochs 1 --batch 128 --lr 0.01 "
        "--train.schedule constant --train.momentum 0 --train.nesterov false --train.weight-decay 0 "
        "--init tcp://{}:23456 --world-size 2 --rank {}"
    )
    second = type_on(2, line.format(address, 1), MANYHANDS_DATA=data)
    one, two = finish(type_on(1, line.format(first, 0), MANYHANDS_DATA=data)), finish(second)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    (run,) = (here / "n1" / "runs").iterdir()
    assert not (here / "n2" / "runs").exists()
    assert processes_of(run) == 2
    score = evaluation(run)
    assert score["count"] == 10_000
    assert score["top1"] > 0.8
    opened = next(line for line in one.err.splitlines() if "23456" in line)
    assert ("every interface" in opened) == (first == "0.0.0.0"), opened
    assert "rank 1 of 2 has joined; rank 0 prints the progress" in two.err


# The torch.distributed notes: torch.distributed.launch on two machines, and init_method's three kinds of address.


@pytest.mark.slow
def test_002_torch_distributed_launch_on_two_nodes(lab, type_everywhere, here):
    launch = (
        "python -m torch.distributed.launch --nproc_per_node=2 --nnodes=2 --node_rank={k} "
        f'--master_addr="{lab.address(1)}" --master_port=1234 -m manyhands '
    )
    explained = [process for ended in type_everywhere(2, f"{launch} explain --json") for process in reported(ended)]
    assert sorted(values(found, "rank", "local_rank") for found in explained) == [[0, 0], [1, 1], [2, 0], [3, 1]]
    for found in explained:
        assert values(found, "world_size", "master_address", "master_port") == [4, lab.address(1), 1234]
        assert found["rank"]["from"] == "RANK"
    type_everywhere(2, f"{launch} train {DIGITS}")
    assert processes_of("n1/run") == 4
    assert evaluation("n1/run")["count"] == 360


EXPORTED = "export MASTER_ADDR={named} MASTER_PORT=29400 WORLD_SIZE=2 RANK={k}; "
WAYS = {
    "variables": (2, EXPORTED.replace("{named}", "{address}"), ""),
    "env://": (2, EXPORTED.replace("{named}", "n1"), "--init env://"),
    "tcp://": (3, "", "--init tcp://n1:23456 --world-size 3 --rank {k}"),
    "file://": (2, "", "--init file://{here}/sharedfile --world-size 2 --rank {k}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_002_the_command_once_on_each_machine(way, lab, names_as_in_debian, type_everywhere, here):
    """After which the documents go on from the first machine's checkpoint."""
    count, exported, init = WAYS[way]
    exported, init = exported.replace("{address}", lab.address(1)), init.replace("{here}", str(here))
    for k, ended in enumerate(type_everywhere(count, f"{exported} manyhands explain {init} --json")):
        (found,) = reported(ended)
        assert values(found, "rank", "world_size") == [k, count]
        if exported:
            named = "n1" if k and way == "env://" else lab.address(1)
            assert values(found, "master_address", "master_port") == [named, 29400]
            assert found["world_size"]["from"] == "WORLD_SIZE"
    for host, ended in enumerate(type_everywhere(count, f"{exported} manyhands train {DIGITS} {init}"), 1):
        assert way != "file://" or f"collectives listen on free ports of eth0 ({lab.address(host)})" in ended.err
    assert processes_of("n1/run") == count
    assert not list(here.glob("n[23]/run")) + list(here.glob("sharedfile"))
    if way == "tcp://":
        type_everywhere(count, f"manyhands train digits mlp {init} --epochs 2 --out more --resume ../n1/run")
        (resumed,) = events("n1/more", "resumed")
        assert resumed["step"] > 0
        assert evaluation("n1/more")["epoch"] == 2


# MindSpore's tutorial: rank tables, on two servers.


@pytest.mark.slow
def test_003_the_same_command_on_two_servers_of_a_table(lab, type_everywhere, here):
    """With 16 cards, as in the document."""
    (here / "table.json").write_text(table_of(lab, 8))
    explained = type_everywhere(2, "manyhands explain --rank-table ../table.json --json")
    for k, ended in enumerate(explained):
        (found,) = reported(ended)
        ranks = [8 * k, 8 * k + 7]
        assert values(found, "machine", "ranks", "world_size", "master_address") == [k, ranks, 16, lab.address(1)]
        assert found["world_size"]["from"] == "--rank-table ../table.json"
    type_everywhere(2, f"manyhands train {DIGITS} --train.max-steps 3 --device cpu --rank-table ../table.json")
    assert processes_of("n1/run") == 16


@pytest.mark.slow
def test_003_a_server_that_is_not_started_is_named(lab, type_on, here):
    (here / "table.json").write_text(table_of(lab, 1))
    line = f"manyhands train {DIGITS} --rank-table ../table.json --cluster.join-timeout-s 2"
    says = ("1 of 2 processes have joined; missing: rank 1", f"where: tcp://{lab.address(1)}:29500")
    ended = finish(type_on(1, line), code=1, says=says)
    assert_one_screen(ended.err)
    assert "--init" not in ended.err


RUN_CLUSTER = """#!/bin/bash
execute_path=$(pwd)
export RANK_TABLE_FILE=$1
export RANK_SIZE=$2
RANK_START=$3
DEVICE_START=0
for((i=0;i<=1;i++));
do
    export RANK_ID=$[i+RANK_START]
    export DEVICE_ID=$[i+DEVICE_START]
    rm -rf ${execute_path}/device_$RANK_ID
    mkdir ${execute_path}/device_$RANK_ID
    cd ${execute_path}/device_$RANK_ID || exit
    manyhands explain --json >explain$RANK_ID.log 2>&1
    manyhands train digits mlp --epochs 1 --out run >train$RANK_ID.log 2>&1 &
done
wait
"""


@pytest.mark.slow
def test_003_run_cluster_sh_on_two_servers(lab, type_on, here):
    (here / "run_cluster.sh").write_text(RUN_CLUSTER)
    (here / "rank_table.json").write_text(table_of(lab, 2))
    started = [type_on(1 + k, f"bash {here}/run_cluster.sh {here}/rank_table.json 4 {2 * k}") for k in (0, 1)]
    assert [finish(process).code for process in started] == [0, 0]
    for rank in range(4):
        folder = here / f"n{1 + rank // 2}" / f"device_{rank}"
        said = (folder / f"train{rank}.log").read_text()
        assert ("evaluated=360" in said) == (rank == 0), said
        found = json.loads((folder / f"explain{rank}.log").read_text())
        assert values(found, "rank", "local_rank", "world_size") == [rank, rank % 2, 4]
        assert found["rank"]["from"] == "RANK_ID"
    assert processes_of("n1/device_0/run") == 4


# ImageNet over three machines: imagenet main.py on three nodes.


@pytest.mark.slow
def test_004_resnet18_on_three_nodes(lab, type_everywhere, here, real_data):
    sample = real_data("imagenet-sample")
    for split in ("train", "val"):
        (here / "ILSVRC2012" / split).mkdir(parents=True)
        for folder in sorted(path for path in sample.iterdir() if path.is_dir())[:12]:
            (here / "ILSVRC2012" / split / folder.name).symlink_to(folder)
    line = (
        "manyhands imagenet ../ILSVRC2012 -a resnet18 -j 2 --epochs 1 -b 4 "
        f"--dist-url tcp://{lab.address(1)}:8090 --dist-backend gloo --multiprocessing-distributed "
        "--world-size 3 --rank {k}"
    )
    for k, ended in enumerate(type_everywhere(3, f"{line} --dry-run")):
        assert f"as rank {k} of 3, rendezvous at tcp://{lab.address(1)}:8090" in ended.out, ended.out
    one, *others = type_everywhere(3, line)
    files = {path.name for path in (here / "n1").iterdir()}
    assert files == {"runs", "checkpoint.pth.tar", "model_best.pth.tar"}
    assert not list((here / "n2").iterdir()) + list((here / "n3").iterdir())
    saved = torch.load("n1/checkpoint.pth.tar", weights_only=True)
    assert (saved["epoch"], saved["arch"]) == (1, "resnet18")
    assert re.search(r"top-?1.*top-?5", one.out + one.err, re.IGNORECASE | re.DOTALL), one.out + one.err
    assert not any(each.out for each in others)
