"""Plans on real processes: what is found computes the same as one process, and a wrong network is caught by name."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.world import World
from manyhands.parallel.plan import Plan
from manyhands.planner.choose import DATA_PARALLEL
from manyhands.planner.timing import OtherLoad
from manyhands.planner.trial import PlanCase, PlanRunner, time_plans, time_share, verify_plan
from manyhands.worker.plan_search import make_plan_case
from tests.planner.nets import graph_of, loss_fn_of_sums, mesh_of, random_plan
from tests.processes.ranks import run_on_ranks

BATCH = 9


class Tokens(nn.Module):
    """Normalizes tokens as rows, [samples x tokens, C]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 8, 8), nn.BatchNorm1d(8), nn.Linear(8, 16)

    def forward(self, x):
        tokens = self.first(x).flatten(2).transpose(1, 2)
        return self.last(self.norm(tokens.flatten(0, 1)).view_as(tokens).mean(1))


def _case(make=None):
    return PlanCase(make or Tokens, torch.zeros(3, 32, 32), 16, BATCH, lambda: loss_fn_of_sums, norm_group=5)


def _proofs(world, sizes):
    """Of data parallel and of six random plans; of a network that each process makes otherwise."""
    plans = [Plan(mesh_of(sizes)), *(random_plan(graph_of(Tokens()), mesh_of(sizes), seed) for seed in range(6))]
    found = [verify_plan(_case(), plan, world) for plan in plans]
    made = iter(range(100))

    def make():
        model = Tokens()
        if next(made):
            with torch.no_grad():
                model.last.bias.add_(1e-3)
        return model

    wrong = verify_plan(_case(make), plans[0], world)
    seconds = time_plans(_case(), {DATA_PARALLEL: None, "cut": plans[2]}, world, rounds=3)
    gradients = []  # under either plan, with and without micro-batches; each process's own pieces
    for plan, size in itertools.product([None, plans[0]], (0, 2)):
        case = replace(_case(lambda: Tokens().double()), norm_group=2, micro_batch=size)
        runner = PlanRunner(replace(case, picture=case.picture.double(), precision="fp64"), plan, world)
        loss = runner.gradients()
        gradients.append([loss, *(one.grad.clone() for one in runner.model.parameters() if one.grad is not None)])
        runner.network.close()
    return found, wrong, seconds, gradients


@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_any_plan_computes_what_one_process_does_and_what_is_not_the_same_is_named(sizes):
    first, *others = run_on_ranks(_proofs, mesh_of(sizes).size, sizes)
    for proofs, wrong, seconds, _ in (first, *others):
        assert proofs == first[0]
        for proof in proofs:
            assert proof.holds, proof
            assert proof.compared > 4
            assert proof.worst > 0
        assert not wrong.holds
        assert wrong.where != ""
        assert wrong.worst > 1e-9
        # All processes get the same seconds.
        assert seconds == first[2]
        assert set(seconds) == {DATA_PARALLEL, "cut"}
        assert all(len(values) == 3 and min(values) > 0 for values in seconds.values())
    # Micro-batches of a trial sum to the gradients of the update.
    for *_, (data, data_parts, split, split_parts) in (first, *others):
        for whole, parts in ((data, data_parts), (split, split_parts)):
            torch.testing.assert_close(parts[1:], whole[1:], rtol=1e-9, atol=1e-12)


class _Watched(nn.Module):
    """Records each batch that it learns from: the number of samples, the precision and the threads."""

    def __init__(self, seen):
        super().__init__()
        self.layer, self.seen = nn.Linear(12, 16), seen

    def forward(self, x):
        out = self.layer(x.flatten(1))
        if not torch.is_inference_mode_enabled() and torch.is_grad_enabled():
            self.seen.append((len(x), out.dtype, torch.get_num_threads()))
        return out


@pytest.mark.parametrize(
    ("precision", "kind"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp64", torch.float64)]
)
def test_a_trial_computes_in_the_jobs_precision_and_micro_batches(precision, kind):
    flags = {
        "data.name": "synthetic:64x3x2x2x16",
        "train.batch": 8,
        "train.micro_batch": 3,
        "train.norm_group": "local",
    }
    job = load_job(flags | {"train.precision": precision}, environment={}).job
    network, seen = {"channels": 3, "size": 2, "classes": 16, "batch": 8}, []
    case = make_plan_case(job, network, "cpu")
    case = replace(case, make=lambda: _Watched(seen).to(case.picture.dtype))
    runner = PlanRunner(case, None, World())
    seen.clear()
    runner.update()
    assert seen == [(count, kind, torch.get_num_threads()) for count in (3, 3, 2)]
    assert all(torch.isfinite(parameter).all() for parameter in runner.model.parameters())


@pytest.mark.parametrize(
    ("batch", "micro_batch", "passed"), [(24, 0, 8), (25, 0, 9), (24, 4, 4), (24, 100, 8), (3, 0, 2)]
)
def test_the_largest_share_is_timed_or_one_pass_of_it(monkeypatch, batch, micro_batch, passed):
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    seen, before = [], torch.get_num_threads()
    case = PlanCase(lambda: _Watched(seen), torch.zeros(3, 2, 2), 16, batch, lambda: loss_fn_of_sums)
    assert time_share(replace(case, micro_batch=micro_batch), 3, before + 1).seconds > 0
    assert set(seen) == {(passed, torch.float32, before + 1)}
    assert torch.get_num_threads() == before
