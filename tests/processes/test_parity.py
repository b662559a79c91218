"""The law of the house: N processes make the same updates as one, also on several machines and under any plan.

So does a compiled network, of which only the passes of a whole update are compiled.
"""

import copy
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.core.world import World
from tests.processes.updates import EXACT, assert_alike, built, lines, make_updates, normed, plain, train, trained

GROUPS = {**EXACT, "train.norm_group": 4}
IN_PARTS, WHOLE_GROUPS = {"train.micro_batch": 4}, {"train.norm_group": 16}
ADAMW, CLIPPED = {"train.optimizer": "adamw", "train.lr": 0.002}, {"train.clip": 0.1, "train.label_smoothing": 0.1}
FSDP = {"parallel.mode": "fsdp"}
BY_STEPS = {"sync.method": "local", "sync.codec": "none", "sync.every": 1, "sync.delay": 0}


@dataclass
class Case:
    flags: dict = field(default_factory=dict)
    until: int = 6
    tolerance: float = 1e-9
    make: Callable | None = normed
    machines: tuple = ()

    def arguments(self, flags):
        return self.until, self.make, {**GROUPS, **flags}, "", self.machines


def split(*pins, mesh="", **flags):
    """A network that is split by pins."""
    named = {key.replace("__", "."): value for key, value in flags.items()}
    return Case({"parallel.mode": "semi", "parallel.mesh": mesh, "parallel.pin": pins, "train.norm_group": 8} | named)


def uneven(*shares, **flags):
    """Of 29: much to one, little to another; also cut into passes, and in groups that several processes hold."""
    return {"cluster.shares": list(shares), **flags}


OUTPUTS, CROSSED = (
    ("0=o@dp", "1=c@dp", "8=o@dp", "loss=o@dp"),
    ("0=o@dp n@tp", "4=n@dp,tp", "5=c@dp,tp", "loss=n@dp o@tp"),
)
TWO_AXES = ("0=n@dp o@tp", "[1-7]=n@dp c@tp", "8=n@dp i@tp")
MACHINES = ((0, 1), (2, 3))
CASES = {
    2: [
        Case(until=20),
        Case(IN_PARTS),
        Case(WHOLE_GROUPS),
        Case(ADAMW),
        Case({"parallel.shared_memory": False}),
        Case({"train.bias_rate": 8.0, "train.decay_norm_and_bias": True}),
        Case({"data.mirror": "alternate", "data.shift": 2, "data.shift_fill": "reflect"}),
        Case(CLIPPED),
        Case(uneven(22, 7)),
        Case(uneven(22, 7) | {"parallel.shared_memory": False}),
        Case(FSDP | uneven(22, 7), until=20),
        Case(FSDP | {"train.channels_last": True}),
        # A network that is initialized from pictures.
        Case({"model.name": "quicknet"}, until=3, make=None),
        # The sum of weighted gradients is the batch's; the method rounds it, so one update is compared coarsely.
        Case(uneven(22, 7) | {"sync.method": "bf16"}, until=1, tolerance=1e-2),
        split(*OUTPUTS),
        split(*OUTPUTS, train__clip=0.1, train__label_smoothing=0.1),
        split("*=n@dp", **ADAMW),
    ],
    3: [
        Case(IN_PARTS, until=20),
        Case(WHOLE_GROUPS),
        Case({"parallel.shared_memory": False}),
        Case(uneven(20, 1, 8) | IN_PARTS),
        Case(uneven(20, 1, 8) | WHOLE_GROUPS),
        # Groups over the whole batch, as torch's synchronized BatchNorm has them; none; an update in single precision.
        Case({"train.norm_group": "global"}),
        Case(IN_PARTS, make=plain),
        Case({"train.precision": "fp32"}, until=1, tolerance=1e-4),
        Case(FSDP, until=20),
        # Local steps that are averaged each time, with equal shares and with unequal ones.
        Case(BY_STEPS | {"train.batch": 27}, make=plain),
        Case(BY_STEPS, make=plain),
        split("4=i@dp", "8=i@dp"),
        split("4=i@dp", "8=i@dp", **ADAMW),
    ],
    4: [
        Case(until=20),
        Case(WHOLE_GROUPS),
        Case(uneven(3, 17, 5, 4) | IN_PARTS),
        Case(machines=MACHINES),
        Case(IN_PARTS, machines=MACHINES),
        Case(machines=((0, 2), (1, 3))),
        split(*TWO_AXES, mesh="dp=2,tp=2", train__micro_batch=8),
        split(*TWO_AXES, mesh="dp=2,tp=2", parallel__full_batch=True),
        split(*CROSSED, mesh="dp=2,tp=2", train__micro_batch=8),
        split(*CROSSED, mesh="dp=2,tp=2", **CLIPPED),
    ],
}


@pytest.mark.parametrize("size", CASES)
def test_several_processes_make_the_updates_of_one(size):
    cases = CASES[size]
    for case, several in zip(cases, trained(size, [case.arguments(case.flags) for case in cases]), strict=True):
        lone = {key: one for key, one in case.flags.items() if not key.startswith(("cluster.", "sync.", "parallel."))}
        alone, exact = train(World(), *case.arguments(lone)), "sync.method" not in case.flags
        summed = [sum(each) for each in zip(*(one.losses for one in several), strict=True)]
        assert summed == pytest.approx(alone.losses, rel=case.tolerance), case
        if case.flags.get("model.name") == "quicknet":
            filters, opposites = alone.model["whiten.weight"].chunk(2)
            assert torch.equal(filters, -opposites)
        for found in several:
            assert not case.machines or found.averages.startswith("gradients are averaged in two levels")
            assert_alike(found.model, alone.model, case.tolerance)
            if exact:
                assert_alike(found.model, several[0].model)
            if exact and case.tolerance <= 1e-9:
                if found.optimizer:
                    assert_alike(found.optimizer, alone.optimizer, case.tolerance, least=1e-6)
                assert torch.equal(found.evaluation[0], alone.evaluation[0]), case
                assert found.evaluation[1] == pytest.approx(alone.evaluation[1], rel=1e-9), case


def test_machines_of_two_processes_take_local_steps_as_two_processes_would():
    local = {"sync.method": "local", "sync.codec": "none", "sync.every": 3, "sync.delay": 2}
    case = 0, plain, {**EXACT, **local, "train.batch": 28, "train.max_steps": 10}, ""
    (two,), (four,) = trained(2, [case]), trained(4, [(*case, MACHINES)])
    for found in four:
        assert_alike(found.model, two[0].model, 1e-9)


@pytest.mark.parametrize(("mode", "why"), [("single", "process shards no ops"), ("data", "mode data shards no ops")])
def test_a_pin_under_a_mode_that_splits_nothing_is_refused(mode, why):
    flags = {"data.name": "synthetic:103x1x8x8x5", "parallel.mode": "data", "parallel.pin": ("*=n@dp",)}
    with pytest.raises(UserError, match=why), built(World(), normed(), flags, mode=mode):
        pass


COMPILED = {"train.batch": 14, "train.precision": "fp32", "train.channels_last": False, "train.compile": True}


def _noted(folder):
    return [one["message"] for one in lines(folder / "events.jsonl")]


@pytest.mark.slow
def test_compiled_updates_are_those_of_the_network_and_only_usual_passes_are_compiled(tmp_path, monkeypatch):
    """Of five updates the last one is smaller."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Set and taken away again by what is tested.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    counters, graphs, weights = torch._dynamo.utils.counters["stats"], [], []
    for compiled in (False, True):
        flags = {"data.name": "synthetic:60x1x8x8x5", "train.epochs": 1, **COMPILED, "train.compile": compiled}
        before = counters["unique_graphs"]
        with built(World(), net := normed(), flags, tmp_path / str(compiled), as_worker=True) as trainer:
            make_updates(trainer, 5)
            trainer.evaluate()
        copy.deepcopy(net)(torch.zeros(3, 1, 8, 8))
        graphs.append(counters["unique_graphs"] - before)
        weights.append(net.state_dict())
    assert_alike(weights[1], weights[0], 1e-4, least=0.1)
    assert graphs == [0, 1]
    said = [note.partition(" the network")[0] for note in _noted(tmp_path / "True") if "the network" in note]
    assert said == ["compiling", "compiled"]
    folder = Path(os.environ["MANYHANDS_CACHE"]) / "compiled"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert any(folder.iterdir())


def test_passes_with_shared_batch_norm_groups_are_not_compiled(tmp_path):
    trained(2, [(1, normed, {**COMPILED, "train.batch": 12}, tmp_path, (), True)])
    assert len([note for note in _noted(tmp_path) if "torch.compile is skipped" in note]) == 1
