"""A new data set, network, mode, sync method, cluster format or check is one file; nothing else is edited.

Each is added to a copy of the installed package and used from the command line.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import manyhands
from tests.e2e.command import PATIENCE_S, environment

DATA = '''
"""Pictures of one colour, which is the class."""

import torch

from manyhands.data.splits import ImagesInMemory, Splits, describe
from manyhands.data.transforms import Pixels

NAMES = ("plain",)


def open(name, options):
    labels = torch.arange(60) % 3
    images = (80 * labels.to(torch.uint8)).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
    split = ImagesInMemory(images, labels)
    pixels = Pixels(4, 1, (0.5,), (0.25,), "none")
    return Splits(split, split, ("dark", "grey", "light"), describe("plain", split, split), pixels)
'''
NETWORK = '''
"""One linear layer."""

from torch import nn

NAMES = ("oneline",)


def build(name, *, channels, size, num_classes, arguments):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, num_classes))
'''
MODE = '''
"""PyTorch's DDP with its own settings, or nothing where a sync method averages gradients."""

from torch.nn.parallel import DistributedDataParallel

from manyhands.core.needs import OWN_AVERAGE, WHOLE_GRADIENTS
from manyhands.parallel.network import ModeTraits, ParallelNetwork

DESCRIPTION = "DDP as it comes"
NORM_GROUPS = True
OFFERS = frozenset({WHOLE_GRADIENTS, OWN_AVERAGE})


def apply(model, world, how):
    if world.alone:
        return ParallelNetwork(model)
    call = DistributedDataParallel(model, process_group=how.group) if how.reduces else model
    return ParallelNetwork(model, call, world, ModeTraits(gradient_scale=float(world.size)))
'''
METHOD = '''
"""The mean of all gradients, made smaller."""

from pydantic import Field

from manyhands.core.needs import OWN_AVERAGE, WHOLE_GRADIENTS
from manyhands.core.options import Options as Base
from manyhands.sync.costs import Cost

DESCRIPTION = "a part of the mean of all gradients"
EXACT = False
NEEDS = (WHOLE_GRADIENTS, OWN_AVERAGE)


class Options(Base):
    part: float = Field(default=1.0, gt=0, description="gentle: the part of the mean that is kept")


def estimate(case, options):
    return [Cost("gentle", 2 * case.step_s, 1.0, 1.0)]


def make(network, party, options, cost):
    import torch.distributed as dist

    from manyhands.sync.synchronizer import Synchronizer

    class Gentle(Synchronizer):
        reduces = False

        def on_gradients(self):
            for _, parameter in network.named_parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.mul_(options.part / party.world.size)

    return Gentle()
'''
FORMAT = '''
"""A line for each machine: "machine NAME with N"."""

from manyhands.cluster.hosts.inventory import Cluster, Machine


def recognise(path, text):
    return text.startswith("machine ")


def read(text, where):
    words = [line.split() for line in text.splitlines()]
    return Cluster(tuple(Machine(line[1], int(line[3])) for line in words))
'''
CHECK = '''
"""That somebody has looked."""

from manyhands.cluster.doctor.findings import DoctorFinding


def run(survey):
    return [DoctorFinding("looked", "ok", survey.hosts, "somebody has looked at it")]
'''
FILES = {
    "data/datasets/plain.py": DATA,
    "models/architectures/oneline.py": NETWORK,
    "parallel/modes/usual.py": MODE,
    "sync/methods/gentle.py": METHOD,
    "cluster/hosts/formats/lines.py": FORMAT,
    "cluster/doctor/checks/looked.py": CHECK,
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The folder that a copy of the package lies in, with one more file of each kind."""
    folder = tmp_path_factory.mktemp("copy")
    package = Path(manyhands.__file__).parent
    shutil.copytree(package, folder / "manyhands", ignore=shutil.ignore_patterns("__pycache__"))
    for place, text in FILES.items():
        file = folder / "manyhands" / place
        assert file.parent.is_dir()
        assert not file.exists()
        file.write_text(text.lstrip())
    return folder


@pytest.fixture
def command(copy, tmp_path):
    """Runs the copy's command in an empty folder."""

    def run(*arguments, code=0):
        ended = subprocess.run(
            [sys.executable, "-m", "manyhands", *map(str, arguments)],
            cwd=tmp_path, env=environment(PYTHONPATH=str(copy)), capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    return run


TRAIN = ("train", "plain", "oneline", "--device", "cpu", "--epochs", "4", "--batch", "20", "--set", "run.report=false")


def plan_of(run):
    return json.loads((run / "plan.json").read_text())


def test_a_data_set_and_a_network(command, tmp_path):
    command(*TRAIN, "--out", "run")
    assert "plain" in (tmp_path / "run" / "job.toml").read_text()


def test_a_mode_and_a_sync_method_with_an_option_of_its_own(command, tmp_path):
    command(*TRAIN, "-n", "2", "--parallel", "usual", "--sync", "gentle", "--set", "sync.part=0.5", "--out", "run")
    plan = plan_of(tmp_path / "run")
    assert (plan["mode"], plan["sync"]["method"]) == ("usual", "gentle")
    assert any("sync.method = gentle" in one for one in plan["exceptions"])
    assert "part = 0.5" in (tmp_path / "run" / "job.toml").read_text()


@pytest.mark.slow
def test_what_a_method_needs_decides_who_takes_it(command):
    said = command(*TRAIN, "-n", "2", "--parallel", "fsdp", "--sync", "gentle", "--out", "run", code=2)
    assert "fsdp can't be combined with --sync gentle" in said
    said = command(*TRAIN, "-n", "2", "--parallel", "usual", "--sync", "bf16", "--out", "run", code=2)
    assert "usual can't be combined with --sync bf16, which needs a hook" in said
    command(*TRAIN, "-n", "2", "--parallel", "usual", "--sync", "powersgd", "--out", "other")


def test_each_is_suggested_and_shown(command):
    assert "gentle" in command("train", "plain", "--sync", "gentel", code=2)
    assert "usual" in command("train", "plain", "--parallel", "usul", code=2)
    assert "sync.part" in command("train", "plain", "--set", "sync.prt=1", code=2)


def test_a_cluster_format(command, tmp_path):
    (tmp_path / "cluster").write_text("machine n1 with 2\nmachine n2 with 4\n")
    command("explain", "--cluster", "cluster", "--write", "hosts")
    assert (tmp_path / "hosts").read_text() == "n1 slots=2\nn2 slots=4\n"


def test_a_check_of_the_doctor(command):
    assert "somebody has looked at it" in command("doctor")
