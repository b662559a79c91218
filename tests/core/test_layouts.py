import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, TensorLayout, bounds, layout_from_plain, split_dimensions
from tests.checkpoint.cuts import MESHES, layouts


@st.composite
def cut_shapes(draw):
    mesh = draw(st.sampled_from(MESHES))
    return mesh, draw(layouts(draw(st.lists(st.integers(0, 9), max_size=4).map(tuple)), mesh))


@given(length=st.integers(0, 1000), parts=st.integers(1, 40))
def test_bounds_are_even_and_complete(length, parts):
    edges = bounds(length, parts)
    sizes = [stop - start for start, stop in itertools.pairwise(edges)]
    assert (edges[0], edges[-1], len(sizes)) == (0, length, parts)
    assert max(sizes) - min(sizes) <= 1


@given(found=cut_shapes())
def test_pieces_cover_the_tensor_once_and_shapes_agree(found):
    mesh, lies = found
    assert sum(math.prod(b - a for a, b in region) for _, region in lies.pieces(mesh)) == math.prod(lies.shape)
    for rank in range(mesh.size):
        region = lies.region(mesh, rank)
        shape = lies.local_shape(mesh, rank)
        assert len(shape) == len(lies.shape)
        assert math.prod(shape) == math.prod(stop - start for start, stop in region)
        same = [other for other in range(mesh.size) if lies.region(mesh, other) == region]
        assert lies.first_holder(mesh, rank) in same
        if math.prod(shape):
            assert lies.first_holder(mesh, rank) == same[0]
    assert layout_from_plain(lies.as_plain(), mesh, "here") == lies


@pytest.mark.parametrize(
    ("shape", "view", "groups"),
    [
        ((), (), []),
        ((6,), (2, 3), [(0, 1)]),
        ((36, 5), (3, 6, 2, 5), [(0, 1, 2), (3,)]),
        ((4, 1), (2, 2, 1), [(0, 1), (2,)]),
        ((1, 4), (1, 2, 2), [(0,), (1, 2)]),
        ((0, 4), (0, 2, 2), [(0,), (1, 2)]),
        ((2, 3), (3, 2), None),
        ((2, 3), (6,), None),
        ((4,), (4, 1), [(0, 1)]),
        ((), (1,), None),
        ((4, 3), (2, 3, 2), None),
    ],
)
def test_how_a_view_splits_dimensions(shape, view, groups):
    found = split_dimensions(shape, view)
    assert (found and [tuple(group) for group in found]) == groups


@pytest.mark.parametrize(
    "change",
    [
        {"view": [5, 4]},
        {"view": [2, 10]},
        {"cuts": [[0, [0]], [0, [1]]]},
        {"cuts": [[0, [0]], [1, [0]]]},
        {"cuts": [[2, [0]]]},
        {"cuts": [[0, [1, 0]]]},
        {"cuts": [[0, [2]]]},
        {"cuts": 3},
        {"shape": [-4, -5], "view": [-4, -5]},
        {"shape": "ab"},
        {"gradient_axes": [2]},
    ],
)
def test_what_is_no_layout_on_the_mesh_is_refused(change):
    mesh = Mesh((("dp", 2), ("tp", 2)))
    plain = TensorLayout((4, 5), (4, 5), ((0, (0,)), (1, (1,)))).as_plain()
    assert layout_from_plain(plain, mesh, "here").cuts
    with pytest.raises(UserError) as caught:
        layout_from_plain({**plain, **change}, mesh, "plan.json: w")
    assert caught.value.where == "plan.json: w"
