"""Costs: the problem that is solved and the prediction that is printed say the same of any letters."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.data.order import equal_share_function
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.planner.collectives import BACKWARD, FORWARD
from manyhands.planner.cost import CostInputs, ShardedOpTimes, largest_shard_shape, predict, sharding_problem
from manyhands.planner.links import mesh_links
from manyhands.planner.solve import evaluate
from manyhands.planner.timing import OpTimes
from manyhands.sync.link_speeds import LinkSpeed
from tests.planner.nets import chain, choices_of, graph_of, heavy, mesh_of, random_letters

BATCH = 16
CHAIN, HEAVY = graph_of(chain(), channels=4), graph_of(heavy())

# One for all, since the rates that it measures differ from time to time.
TIMES = OpTimes(budget_s=0.0)


def _setting(graph, sizes, **others):
    mesh = mesh_of(sizes)
    links = mesh_links(mesh, per_machine=1, between=LinkSpeed(1e8, 1e-4))
    work = ShardedOpTimes(graph, BATCH, mesh.size, TIMES)
    return CostInputs(work, links, equal_share_function(BATCH, 0), **others)


@settings(max_examples=20)
@given(st.sampled_from([(2,), (4,), (4, 2), (2, 2, 2)]), st.integers(0, 10**6))
def test_a_chain_costs_the_same_in_the_problem_and_in_the_prediction(sizes, seed):
    setting = _setting(CHAIN, sizes, memory_limit_bytes=1e12)
    letters = random_letters(CHAIN, setting.mesh, seed)
    one = sharding_problem(CHAIN, setting)
    reported = evaluate(one.problem, choices_of(one, letters))
    assert one.letters(reported.choices) == letters
    predicted = predict(CHAIN, letters, setting)
    # Labels are 64 bits wide; the problem leaves them out, as they are the same few bytes everywhere.
    sent = [c for c in predicted.collectives if c.when in {FORWARD, BACKWARD} and c.item_bytes == 4]
    expected = predicted.compute_seconds + sum(c.seconds(setting.links) for c in sent)
    free = [[replace(choice, gradient_seconds=0.0) for choice in node] for node in one.problem.nodes]
    assert evaluate(replace(one.problem, nodes=free), reported.choices).seconds == pytest.approx(expected, rel=1e-9)
    assert predicted.compute_seconds > 0
    # A limit that the problem keeps, the prediction keeps: bytes of conversions before the loss are the only ones more.
    assert reported.memory_bytes >= predicted.memory_bytes * (1 - 1e-9)


@pytest.mark.parametrize("processes", [2, 8])
def test_cut_weights_take_a_part_of_the_memory_and_send_no_gradients(processes):
    setting = _setting(HEAVY, (processes,))
    whole = dict.fromkeys(HEAVY.ops, ("n",))
    cut = {**whole, "4": ("o",), "5": ("c",), "6": ("i",)}
    data, split = predict(HEAVY, whole, setting), predict(HEAVY, cut, setting)
    assert split.memory_bytes < data.memory_bytes / processes * 1.5
    assert split.sent_bytes < data.sent_bytes
    assert data.gradient_seconds >= split.gradient_seconds


def test_more_processes_compute_less_and_copies_as_much_as_one():
    letters = dict.fromkeys(CHAIN.ops, ("n",))
    seconds = [predict(CHAIN, letters, _setting(CHAIN, (count,))).compute_seconds for count in (2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    alike = dict.fromkeys(CHAIN.ops, ("r",))
    same = [predict(CHAIN, alike, _setting(CHAIN, (count,))).compute_seconds for count in (2, 4, 8)]
    # Ops are priced at the piece that data parallel gives a process; what moving and computing share there, differs.
    assert same == pytest.approx([same[0]] * 3, rel=0.3)


def test_where_kernels_may_differ_nobody_computes_parameters_twice():
    one = sharding_problem(CHAIN, _setting(CHAIN, (2, 2), repeat=False))
    for ops, choices in zip(one.groups, one.choices, strict=True):
        learns = any(op.parameters() for op in ops)
        assert any("r" in letters for letters in choices) != learns


def test_groups_that_span_processes_cost_sums_in_both_directions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten())
    group_batch_norms(model)
    graph = graph_of(model, size=8)
    mesh, letters = mesh_of((4,)), dict.fromkeys(graph.ops, ("n",))
    work = ShardedOpTimes(graph, BATCH, 4, TIMES)
    apart, spanning = (
        predict(graph, letters, CostInputs(work, mesh_links(mesh), equal_share_function(BATCH, group)))
        for group in (4, 8)
    )
    assert len(spanning.collectives) - len(apart.collectives) == 2 * 2
    assert spanning.communication_seconds > apart.communication_seconds


def test_ops_are_measured_once_and_scaled(tmp_path):
    times = OpTimes(budget_s=60.0, folder=tmp_path)
    work = ShardedOpTimes(CHAIN, BATCH, 2, times)
    op, mesh = CHAIN.ops["3"], mesh_of((2,))
    whole, half = (work.seconds(op, letters, mesh)[0] for letters in (("r",), ("n",)))
    assert times.measured == 1
    assert 0 < half < whole


@given(st.sampled_from([(2,), (4, 2), (2, 2, 2)]), st.integers(0, 10**6))
def test_a_piece_is_a_part_of_what_is_whole(sizes, seed):
    mesh = mesh_of(sizes)
    letters = random_letters(CHAIN, mesh, seed)
    for op in CHAIN.ops.values():
        if op.extents:
            shape, dims = largest_shard_shape(op, letters[op.name], mesh, BATCH), (BATCH, *op.extent.dims[1:])
            assert all(0 < part <= length <= part * mesh.size for part, length in zip(shape, dims, strict=True))
