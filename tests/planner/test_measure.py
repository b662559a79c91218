"""Collectives timed on live processes: the same numbers everywhere, and data that a file can hold."""

import torch.distributed as dist

from manyhands.core.link_speeds import KINDS, links_of
from manyhands.core.mesh import make_mesh
from manyhands.planner.measure import axis_sets, measure_collectives
from tests.processes.ranks import run_on_ranks

MESH = {"dp": 2, "tp": 2}


def test_sets_of_axes_leave_out_axes_of_one():
    assert axis_sets(make_mesh({"dp": 2, "tp": 1, "tp2": 2})) == [(0,), (2,), (0, 2)]


def _measured(world, kinds, budget_s):
    mesh = make_mesh(MESH)
    groups = {}
    for axes in axis_sets(mesh):
        for ranks in sorted({tuple(mesh.peers(axes, rank)) for rank in range(mesh.size)}):
            group = dist.new_group(list(ranks))
            if world.rank in ranks:
                groups[axes] = group
    return measure_collectives(groups, kinds=kinds, sizes_bytes=(1000, 100_000), budget_s=budget_s)


def test_all_processes_get_the_same_points_for_each_collective():
    first, *others = run_on_ranks(_measured, 4, KINDS, 60.0)
    assert all(other == first for other in others)
    assert set(first) == {(kind, axes) for kind in KINDS for axes in ((0,), (1,), (0, 1))}
    for points in first.values():
        assert [size for size, _ in points] == sorted({size for size, _ in points})
        assert len(points) == 2
        assert all(seconds > 0 for _, seconds in points)
    links = links_of(make_mesh(MESH))
    measured = type(links)(links.mesh, links.axes, links.across, first)
    assert measured.seconds("all_reduce", (0,), 1000) == first["all_reduce", (0,)][0][1]


def test_without_a_budget_each_is_timed_once_and_nobody_waits_for_ever():
    first, other, *_ = run_on_ranks(_measured, 4, ("all_reduce", "all_gather"), 0.0)
    assert first == other
    assert {len(points) for points in first.values()} == {1}
