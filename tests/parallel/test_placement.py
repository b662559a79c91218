"""The algebra of placements, without processes."""

import math

from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.mesh import Mesh
from manyhands.parallel.mesh.placement import (
    Extent,
    conversion_collectives,
    conversion_steps,
    gradient_layout,
    value_layout,
)

COMMON = st.sampled_from([0, 1, 2, "R", "P"])


@st.composite
def _pairs(draw):
    axes = draw(st.integers(1, 3))
    return tuple(tuple(draw(COMMON) for _ in range(axes)) for _ in range(2))


@st.composite
def _meshes(draw, count):
    return Mesh(tuple((f"a{number}", draw(st.integers(1, 3))) for number in range(count)))


def _followed(source, steps):
    """The layout after some steps, checking that each may be taken where it stands."""
    here = list(source)
    for step in steps:
        assert list(step.axes) == sorted(step.axes)
        before = {here[axis] for axis in step.axes}
        cut = step.joined if step.kind == "all_to_all" else step.dim
        wanted = {"all_reduce": "P", "reduce_scatter": "P", "slice": "R", "keep_first": "R"}.get(step.kind, cut)
        assert before == {wanted}, step
        for axis in step.axes:
            here[axis] = {"all_reduce": "R", "all_gather": "R", "pad": "P", "keep_first": "P"}.get(step.kind, step.dim)
        if step.kind in {"slice", "reduce_scatter", "all_to_all"}:
            assert [a for a, one in enumerate(here) if one == step.dim] == [*step.outer, *step.axes]
        if step.kind in {"all_gather", "pad"}:
            assert [a for a, one in enumerate(here) if one == step.dim] == list(step.outer)
    return tuple(here)


@given(_pairs())
def test_steps_end_in_the_target(pair):
    source, target = pair
    assert _followed(source, conversion_steps(source, target)) == target


@given(_pairs())
def test_nothing_is_sent_where_nothing_must_be(pair):
    source, _ = pair
    assert conversion_steps(source, source) == []
    # From whole tensors every layout is had without a message, and what is cut is a sum of padded pieces for nothing.
    assert not any(step.communicates for step in conversion_steps(("R",) * len(source), source))
    sums = tuple("P" if isinstance(one, int) else one for one in source)
    assert not any(step.communicates for step in conversion_steps(source, sums))


@given(_pairs())
def test_what_stays_is_not_gathered(pair):
    """An axis is gathered only where it leaves its dimension or a more major cut of that dimension changes."""
    source, target = pair
    for step in conversion_steps(source, target):
        if step.kind != "all_gather":
            continue
        for axis in step.axes:
            places = [
                [a for a, one in enumerate(layout) if one == step.dim and a < axis] for layout in (source, target)
            ]
            assert target[axis] != step.dim or places[0] != places[1] or source[axis] != step.dim


@given(st.data(), st.integers(1, 9), st.integers(0, 2))
def test_messages_are_as_large_as_the_pieces(data, batch, rows):
    source, target = data.draw(_pairs())
    mesh = data.draw(_meshes(len(source)))
    extent = Extent((batch * rows or 5, 7, 4), rows)
    for rank in range(mesh.size):
        sent = conversion_collectives(source, target, extent, mesh, batch, rank)
        steps = [one for one in conversion_steps(source, target) if one.communicates and mesh.shard_count(one.axes) > 1]
        assert [(one.kind, one.axes) for one in sent] == [(step.kind, step.axes) for step in steps]
        # Padding to the longest piece of a group adds less than one slice for each of its members.
        assert all(0 <= one.values <= extent.values(batch) + mesh.size * 7 * 9 * 4 for one in sent)
    if all(one == "P" for one in source) and all(one == "R" for one in target) and mesh.size > 1:
        assert sent[0].values == extent.values(batch)


@given(_pairs(), st.integers(1, 3))
def test_ranks_of_a_group_send_alike(pair, size):
    """Collectives but all_to_all take equal pieces of all: nobody waits for a message of another length."""
    source, target = pair
    mesh = Mesh(tuple((f"a{number}", size) for number in range(len(source))))
    extent = Extent((5, 7, 4), 1)
    found = [conversion_collectives(source, target, extent, mesh, 5, rank) for rank in range(mesh.size)]
    for rank in range(mesh.size):
        for place, one in enumerate(found[rank]):
            peers = mesh.peers(one.axes, rank)
            if one.kind != "all_to_all":
                assert {found[peer][place].values for peer in peers} == {one.values}


@given(st.lists(st.sampled_from([0, 1, 2, "R", "B", "P"]), min_size=1, max_size=3))
def test_a_gradient_is_the_dual_of_its_value(sides):
    values, gradients = value_layout(sides), gradient_layout(sides)
    for side, value, gradient in zip(sides, values, gradients, strict=True):
        assert isinstance(side, int) == isinstance(value, int) == isinstance(gradient, int)
        if isinstance(side, int):
            assert value == gradient == side
        else:
            assert (value, gradient) != ("P", "P")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 20))
def test_pieces_of_a_batch_contain_complete_samples(dims, rows, batch):
    edges = Extent((rows, *dims), rows).edges(0, 4, batch)
    assert edges[0] == 0
    assert edges[-1] == batch * rows
    assert all(edge % rows == 0 for edge in edges)
    assert Extent((rows, *dims), rows).values(batch) == batch * rows * math.prod(dims)
