"""How strategies are written, ours and MindSpore's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh
from manyhands.parallel.split.strategy import (
    MEANINGS,
    from_mindspore,
    is_tuples,
    parse_strategy,
    parse_tuples,
    write_strategy,
)
from manyhands.planner.find import factorizations

SQUARE = Mesh((("dp", 2), ("tp", 2)))
CUBE = Mesh((("a", 2), ("b", 3), ("c", 4)))
LETTERS = st.sampled_from(sorted(MEANINGS))


@given(st.integers(1, 3), st.data())
def test_what_is_written_is_read(axes, data):
    mesh = Mesh(tuple((name, 2) for name in ("dp", "tp", "tp2")[:axes]))
    letters = tuple(data.draw(LETTERS) for _ in range(axes))
    text = write_strategy(letters, mesh)
    assert parse_strategy(text, mesh, "pin") == dict(enumerate(letters))
    words = data.draw(st.permutations(text.split()))
    assert parse_strategy("  ".join(words), mesh, "pin") == dict(enumerate(letters))
    assert not is_tuples(text)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
def test_tuples_are_read_in_each_of_their_forms(numbers):
    tuples = tuple(tuple(one) for one in numbers)
    inner = ", ".join(str(one) for one in tuples)
    for text in (str(tuples), f"{{{inner}}}", f"[{inner}]" if len(tuples) > 1 else str(list(tuples))):
        assert is_tuples(text)
        assert parse_tuples(text, "pin") == tuples


@given(st.text(alphabet="nocihvrxyz@,dptp 2()=", max_size=14))
def test_anything_is_read_or_refused(text):
    for read in (parse_strategy, lambda text, _, where: parse_tuples(text, where)):
        refused = None
        try:
            assert read(text, SQUARE, "pin")
        except UserError as error:
            refused = error
        assert refused is None or (refused.where == "pin" and refused.hints)


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("MatMul", "((1, 1), (1, 2))", "o@dp r@tp"),
        ("MatMul", "{(1, 1), (1, 2)}", "o@dp r@tp"),
        ("linear", "((2, 1), (1, 2))", "n@dp o@tp"),
        ("linear", "((1, 2), (2, 1))", "i@dp r@tp"),
        ("linear", "((2, 2), (2, 1))", "n@dp i@tp"),
        ("linear", "((4, 1), (1, 1))", "n@dp,tp"),
        ("linear", "((2, 1, 1), (1, 2), (2,))", "n@dp o@tp"),
        ("Dense", "((1, 1), (1, 1))", "r@dp,tp"),
        ("conv", "((2, 1, 1, 1), (2, 1, 1, 1))", "n@dp o@tp"),
        ("conv2d", "((1, 2, 1, 1), (2, 2, 1, 1))", "i@dp o@tp"),
        ("conv", "((1, 2, 1), (2, 2, 1))", "i@dp o@tp"),
        ("batch_norm", "((2, 2, 1, 1), (2,), (2,))", "n@dp c@tp"),
        ("elementwise", "((4, 1, 1, 1),)", "n@dp,tp"),
    ],
)
def test_mindspores_tuples(kind, text, wanted):
    assert from_mindspore(kind, parse_tuples(text, "pin"), SQUARE) == parse_strategy(wanted, SQUARE, "pin")


def tuples_of(kind):
    return lambda text: from_mindspore(kind, parse_tuples(text, "plan.json, fc"), SQUARE)


def strategy(text):
    return parse_strategy(text, SQUARE, "plan.json, fc")


@pytest.mark.parametrize(
    ("read", "text", "names"),
    [
        (strategy, "", "empty"),
        (strategy, "x@dp", '"x@dp" is not a part'),
        (strategy, "n@dp o@zz", "the axis zz"),
        (strategy, "n@dp o@dp", "the axis dp twice"),
        (strategy, "n@dp,dp", "the axis dp twice"),
        (tuples_of("linear"), "((1, 2), (1, 1))", "split into 2 parts, but the weight's into 1"),
        (tuples_of("linear"), "((3, 1), (1, 1))", "3 pieces"),
        (tuples_of("conv"), "((1, 1, 2, 1), (1, 1, 1, 1))", "height and width"),
        (tuples_of("conv"), "((1, 2, 1, 1), (1, 1, 1, 1))", "split into 2 parts, but the weight's into 1"),
        (tuples_of("pool"), "((1, 1, 2, 1),)", "only samples and channels"),
        (tuples_of("linear"), "((2, 1), (1, 2), (3,))", "the bias as ((3,),)"),
        (tuples_of("linear"), "((2, 1),)", "a tuple of 2 numbers for the weight"),
        (tuples_of("conv"), "((2, 1, 1, 1), (1, 2))", "a tuple of 4 numbers for the weight"),
        *[
            (tuples_of("linear"), text, "is not a strategy")
            for text in (
                "((0, 1), (1, 2))", "((1, 1), (1, 2)", "(1, 2)", "{}", "()", "((1.5, 1),)", "((a,),)", "((),)"
            )
        ],
    ],
)  # fmt: skip
def test_a_wrong_strategy_is_named(read, text, names):
    with pytest.raises(UserError) as caught:
        read(text)
    assert names in str(caught.value)
    assert read is not strategy or "plan.json, fc" in str(caught.value)


@given(st.integers(2, 24), st.data())
def test_as_many_pieces_come_out_as_were_asked_for(world_size, data):
    mesh = data.draw(st.sampled_from(factorizations(world_size)))
    letters = tuple(data.draw(st.sampled_from("nior")) for _ in mesh.axes)
    counts = {letter: mesh.parts([a for a, one in enumerate(letters) if one == letter]) for letter in "nio"}
    tuples = ((counts["n"], counts["i"]), (counts["i"], counts["o"]))
    found = from_mindspore("linear", tuples, mesh)
    for letter, count in counts.items():
        assert mesh.parts([axis for axis, one in found.items() if one == letter]) == count
