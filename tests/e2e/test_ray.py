"""Inside Ray Train's TorchTrainer, with a real Ray: its process group is used and stays."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.command import finish, start

NEEDED = ("ray", "pandas", "pyarrow")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason='NOT SHOWN inside Ray Train: pip install "ray[train]"',
    ),
]
SCRIPT = """\
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


def test_torch_trainers_processes_train_together(tmp_path, tmp_path_factory):
    script = tmp_path / "trainer.py"
    script.write_text(SCRIPT)
    # Ray's sockets lie there, and their paths are limited to 107 characters.
    short = Path(tmp_path_factory.getbasetemp()).parent / "ray"
    out = tmp_path / "run"
    own = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1"}
    own["PYTHONPATH"] = os.pathsep.join(sys.path)  # Ray's workers are started elsewhere
    ended = finish(start(out, short, program=(str(script),), cwd=tmp_path, **own))
    assert ended.code == 0, ended.out + ended.err
    assert [Path(f"{out}-{rank}.txt").read_text() for rank in (0, 1)] == ["2.0 finished"] * 2
    assert json.loads((out / "env.json").read_text())["processes"] == 2
