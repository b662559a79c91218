"""fit, evaluate and session inside a process group that somebody else made, and will go on to use."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import run

# What a script's own group is worth to it: before, between and after.
SCRIPT = """\
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
try:
    manyhands.fit(net, samples, batch=8, no_such=1)
except manyhands.ManyhandsError:
    stands()
else:
    raise AssertionError
try:
    manyhands.fit(net, "digits", processes=2)
except manyhands.ManyhandsError as error:
    assert "already in a process group" in str(error)
else:
    raise AssertionError
print(dist.get_rank(), run.status, found.count, flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "backend"),
    [pytest.param(2, ["gloo"], id="two"), pytest.param(1, [], id="alone", marks=pytest.mark.slow)],
)
def test_a_scripts_own_group_is_used_and_stays(here, processes, backend):
    ended = run("train", "script.py", "-n", processes, "--out", "run", "--", *backend)
    assert ended.code == 0, ended.out + ended.err
    for rank in range(processes):
        assert Path("run", "ranks", f"{rank}.log").read_text().endswith(f"{rank} finished 40\n")
    assert json.loads(Path("first/env.json").read_text())["processes"] == processes
