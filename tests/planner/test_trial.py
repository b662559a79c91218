"""Plans on real processes: what is found computes the same as one process, and a wrong network is caught by name."""

import random

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torchvision.models as zoo

from manyhands.parallel.plan import Plan, concise
from manyhands.planner.choose import DATA_PARALLEL
from manyhands.planner.trial import Case, measure, verify
from tests.planner.nets import chain, graph_of, mesh_of, random_letters
from tests.processes.ranks import run_on_ranks

BATCH = 9


def _criterion(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), output


def _resnet():
    torch.manual_seed(0)
    return zoo.resnet18(num_classes=16)


MAKERS = {"chain": (chain, 4), "resnet18": (_resnet, 3)}


def _case(name, make=None):
    made, channels = MAKERS[name]
    return Case(make or made, torch.zeros(channels, 32, 32), 16, BATCH, _criterion, norm_group=5)


def _random_plan(name, sizes, seed):
    make, channels = MAKERS[name]
    graph, mesh = graph_of(make(), channels=channels), mesh_of(sizes)
    default, ops = concise(random_letters(graph, mesh, random.Random(seed)), graph, mesh)
    return Plan(mesh, ops, default)


def _verify(world, name, plans):
    return [verify(_case(name), plan, world) for plan in plans]


@pytest.mark.parametrize(
    ("name", "sizes"), [("chain", (2,)), ("chain", (2, 2)), pytest.param("resnet18", (2,), marks=pytest.mark.slow)]
)
def test_any_plan_computes_what_one_process_does(name, sizes):
    mesh = mesh_of(sizes)
    plans = [Plan(mesh), *(_random_plan(name, sizes, seed) for seed in range(3))]
    first, *others = run_on_ranks(_verify, mesh.size, name, plans)
    assert all(other == first for other in others)
    for proof in first:
        assert proof.holds, proof
        assert proof.compared > 4
        assert proof.worst > 0


def _verify_changed(world):
    made = iter(range(100))

    def make():
        model = chain()
        if next(made):
            with torch.no_grad():
                model[7].bias += 1e-3
        return model

    return verify(_case("chain", make), Plan(mesh_of((2,))), world)


def test_what_is_not_the_same_is_named():
    for proof in run_on_ranks(_verify_changed, 2):
        assert not proof.holds
        assert proof.where != ""
        assert proof.worst > 1e-9


def _measure(world):
    plans = {DATA_PARALLEL: None, "cut": _random_plan("chain", (2,), 1)}
    return measure(_case("chain"), plans, world, rounds=3)


def test_all_processes_get_the_same_seconds():
    one, other = run_on_ranks(_measure, 2)
    assert one == other
    assert set(one) == {DATA_PARALLEL, "cut"}
    assert all(len(values) == 3 and min(values) > 0 for values in one.values())
