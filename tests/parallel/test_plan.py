"""Plans and strategies, ours and MindSpore's: written, read again, and refused with the op and the reason."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, TensorLayout, parse_mesh
from manyhands.core.world import World
from manyhands.parallel.network import ModeRequest
from manyhands.parallel.options import ParallelOptions
from manyhands.parallel.plan import Plan, parse_pins, plan_from_options, plan_from_plain, read_plan
from manyhands.parallel.split.execute import parameter_layouts
from manyhands.parallel.split.network import shard_by_plan
from manyhands.parallel.split.strategy import (
    MEANINGS,
    is_mindspore,
    mindspore_letters,
    parse_mindspore,
    parse_strategy,
    refusal,
    resolve_letters,
    shorten_strategies,
    write_strategy,
)
from manyhands.parallel.split.tracing import describe_network
from manyhands.planner.find import factorizations

SQUARE = Mesh((("dp", 2), ("tp", 2)))
MESHES = st.sampled_from([SQUARE, Mesh((("dp", 2),)), Mesh((("dp", 3),)), Mesh((("a", 2), ("b", 2), ("c", 2)))])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.twice = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(self.deep(x) + x).mean((2, 3))
        return self.fc(self.twice(torch.relu(self.twice(x))))


GRAPH = describe_network(Net(), torch.zeros(3, 8, 8))


@settings(deadline=None)
@given(MESHES, st.data())
def test_a_concise_plan_says_all(mesh, data):
    letters = {}
    for ops in GRAPH.ops_by_tie().values():
        common = sorted(set.intersection(*[set(op.allowed_letters()) for op in ops if op.letters]))
        fitting = st.tuples(*[st.sampled_from(common) for _ in mesh.axes]).filter(
            lambda one, ops=ops: not any(refusal(op, one, mesh) for op in ops)
        )
        letters |= dict.fromkeys([op.name for op in ops], data.draw(fitting))
    default, ops = shorten_strategies(letters, GRAPH, mesh)
    plan = Plan(mesh, ops, default)
    assert resolve_letters(plan, GRAPH) == {name: letters[name] for name in GRAPH.ops}
    again = plan_from_plain(json.loads(json.dumps(plan.as_plain())), "plan.json")
    assert resolve_letters(again, GRAPH) == resolve_letters(plan, GRAPH)


NAMES = st.text(alphabet="abc.*01", min_size=1, max_size=8)


@given(
    MESHES,
    st.dictionaries(NAMES, st.sampled_from(["n@dp", "o@dp", "((1, 1), (1, 2))"])),
    st.lists(NAMES, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={"reason": NAMES, "predicted": st.dictionaries(NAMES, st.integers()), "somebody's own": st.integers()},
    ),
)
def test_a_plan_comes_back_as_it_was_written(tmp_path_factory, mesh, ops, pinned, about):
    layout = TensorLayout((8, 4), (8, 4), ((0, (0,)),), (len(mesh.axes) - 1,))
    plan = Plan(mesh, ops, f"n@{','.join(mesh.names)}", tuple(pinned), {"fc.weight": layout}, about)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(json.dumps(plan.as_plain()))
    assert read_plan(path) == plan


@given(st.integers(1, 3), st.data())
def test_what_is_written_is_read(axes, data):
    mesh = Mesh(tuple((name, 2) for name in ("dp", "tp", "tp2")[:axes]))
    letters = tuple(data.draw(st.sampled_from(sorted(MEANINGS))) for _ in range(axes))
    text = write_strategy(letters, mesh)
    assert parse_strategy(text, mesh, "pin") == dict(enumerate(letters))
    words = data.draw(st.permutations(text.split()))
    assert parse_strategy("  ".join(words), mesh, "pin") == dict(enumerate(letters))
    assert not is_mindspore(text)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
def test_tuples_are_read_in_each_of_their_forms(numbers):
    tuples = tuple(tuple(one) for one in numbers)
    inner = ", ".join(str(one) for one in tuples)
    for text in (str(tuples), f"{{{inner}}}", f"[{inner}]" if len(tuples) > 1 else str(list(tuples))):
        assert is_mindspore(text)
        assert parse_mindspore(text, "pin") == tuples


@given(st.text(alphabet="nocihvrxyz@,dptp 2()=", max_size=14))
def test_anything_is_read_or_refused(text):
    for read in (parse_strategy, lambda text, _, where: parse_mindspore(text, where)):
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
    assert mindspore_letters(kind, parse_mindspore(text, "pin"), SQUARE) == parse_strategy(wanted, SQUARE, "pin")


@given(st.integers(2, 24), st.data())
def test_as_many_pieces_come_out_as_were_asked_for(world_size, data):
    mesh = data.draw(st.sampled_from(factorizations(world_size)))
    letters = tuple(data.draw(st.sampled_from("nior")) for _ in mesh.axes)
    counts = {letter: mesh.shard_count([a for a, one in enumerate(letters) if one == letter]) for letter in "nio"}
    tuples = ((counts["n"], counts["i"]), (counts["i"], counts["o"]))
    found = mindspore_letters("linear", tuples, mesh)
    for letter, count in counts.items():
        assert mesh.shard_count([axis for axis, one in found.items() if one == letter]) == count


def test_a_plan_without_a_strategy_is_data_parallel():
    assert set(resolve_letters(Plan(SQUARE), GRAPH).values()) == {("n", "n")}
    assert resolve_letters(Plan(parse_mesh("dp=2,tp=4"), {"fc": "i@dp,tp"}), GRAPH)["fc"] == ("i", "i")


def test_the_last_pattern_wins_and_globs_bind_those_who_know_the_letter():
    letters = resolve_letters(Plan(SQUARE, {"*": "n@dp o@tp", "stem": "n@dp r@tp", "stem.0": "n@dp i@tp"}), GRAPH)
    assert letters["fc"] == ("n", "o")
    assert letters["stem.0"] == ("n", "i")
    assert letters["stem.1"] == ("n", "r")
    assert letters["deep"] == ("n", "c")
    assert letters["input"] == ("n", "n")


class Products(nn.Module):
    """Raw products with parameters, as a cell of MindSpore has them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(24, 8))
        self.other = nn.Parameter(torch.rand(5, 8))

    def forward(self, x):
        x = torch.relu(torch.flatten(x, 1) @ self.weight).cumsum(1)
        return torch.nn.functional.linear(x, self.other)


PRODUCTS = describe_network(Products(), torch.zeros(6, 4))


def test_products_are_cut_with_their_parameters_as_tuples_say():
    mesh = Mesh((("dp", 2),))
    letters = resolve_letters(Plan(mesh, {"matmul": "((1,1),(1,2))", "linear": "((1,2),(2,1))"}), PRODUCTS)
    assert [letters[name] for name in ("matmul", "weight", "linear", "other")] == [("o",), ("o",), ("i",), ("i",)]
    layouts = parameter_layouts(PRODUCTS, letters)
    assert layouts["weight"].cuts == ((1, (0,)),)
    assert layouts["other"].cuts == ((1, (0,)),)
    assert resolve_letters(Plan(mesh, {"weight": "o@dp"}), PRODUCTS)["matmul"] == ("o",)


def test_a_shared_layer_may_be_said_once_or_twice_alike():
    for ops in ({"twice": "o@dp"}, {"twice#2": "o@dp"}, {"twice": "o@dp", "twice#2": "o@dp"}):
        letters = resolve_letters(Plan(Mesh((("dp", 2),)), ops), GRAPH)
        assert letters["twice"] == letters["twice#2"] == ("o",)


def strategy(text):
    return lambda: parse_strategy(text, SQUARE, "plan.json, fc")


def tuples(kind, text):
    return lambda: mindspore_letters(kind, parse_mindspore(text, "plan.json, fc"), SQUARE)


def network(mesh, ops, graph=GRAPH):
    return lambda: resolve_letters(Plan(parse_mesh(mesh), ops), graph, "plan.json, fc")


def products(pin):
    return network("dp=2", pin, PRODUCTS)


def options(**given):
    return lambda: plan_from_options(ParallelOptions(**given), 2)


def edited(text):
    def read():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json, fc"
            path.write_text(text)
            read_plan(path)

    return read


PLAN = '{"format": "plan/1", "mesh": {"dp": 2}'
REFUSED = [
    (strategy(""), "plan.json, fc"),
    (strategy("x@dp"), '"x@dp" is not a valid part'),
    (strategy("n@dp o@zz"), "the axis zz"),
    (strategy("n@dp o@dp"), "the axis dp twice"),
    (strategy("n@dp,dp"), "the axis dp twice"),
    (tuples("linear", "((1, 2), (1, 1))"), "split into 2 parts, but the weight's into 1"),
    (tuples("linear", "((3, 1), (1, 1))"), "3 pieces"),
    (tuples("conv", "((1, 1, 2, 1), (1, 1, 1, 1))"), "height and width"),
    (tuples("conv", "((1, 2, 1, 1), (1, 1, 1, 1))"), "split into 2 parts, but the weight's into 1"),
    (tuples("pool", "((1, 1, 2, 1),)"), "only samples and channels"),
    (tuples("linear", "((2, 1), (1, 2), (3,))"), "the bias as ((3,),)"),
    (tuples("linear", "((2, 1),)"), "a tuple of 2 numbers for the weight"),
    (tuples("conv", "((2, 1, 1, 1), (1, 2))"), "a tuple of 4 numbers for the weight"),
    *[
        (tuples("linear", text), "is not a strategy")
        for text in ("((0, 1), (1, 2))", "((1, 1), (1, 2)", "(1, 2)", "{}", "()", "((1.5, 1),)", "((a,),)", "((),)")
    ],
    (network("dp=2,tp=2", {"fc": "n@dp h@tp"}), "the op has no dimension h"),
    (network("dp=3,tp=2", {"fc": "o@dp,tp"}), "5 can't be divided into 6 pieces"),
    (network("dp=3", {"deep": "c@dp"}), "8 can't be divided into 3 equal pieces"),
    (network("dp=2", {"loss": "c@dp"}), "the op has no dimension c"),
    (network("dp=2", {"fcc": "n@dp"}), "no op fcc"),
    (network("dp=2", {"layer9.*": "n@dp"}), "no op layer9.*"),
    (network("dp=2", {"fc": "n@tp"}), "the axis tp"),
    (network("dp=2", {"twice": "o@dp", "twice#2": "i@dp"}), "twice and twice#2 share a parameter"),
    (network("dp=2", {"fc": "((2, 1), (2, 1))"}), "input's features are split into 1 parts, but the weight's into 2"),
    (products({"cumsum": "((1,1),(1,2))"}), "reads 1 tensor(s)"),
    (products({"cumsum": "((1,2),)"}), "the op has no dimension c"),
    (products({"relu": "((2,1,1),)"}), "would be split into (2, 1)"),
    (products({"*": "h@dp"}), "have no dimension h"),
    (products({"[rc]*": "v@dp"}), "the ops relu, cumsum have"),
    (products({"matmul": "((1,1),(1,1,2))"}), "a tuple of 2 numbers for the weight"),
    (options(pin=("fc",)), "not a pin"),
    (options(full_batch=True, mesh="dp=2", pin=("input=n@dp",)), "can't be combined"),
    (edited("{"), "plan.json, fc"),
    (edited("[]"), '"format"'),
    (edited('{"format": "plan/2", "mesh": {"dp": 2}}'), "plan/1"),
    (edited('{"format": "plan/1"}'), '"mesh"'),
    (edited('{"format": "plan/1", "mesh": {}}'), "one to three axes"),
    (edited('{"format": "plan/1", "mesh": {"dp": 0}}'), "dp has size 0"),
    (edited('{"format": "plan/1", "mesh": {"dp": true}}'), "dp has size"),
    (edited(PLAN + ', "ops": {"fc": 3}}'), '"ops"'),
    (edited(PLAN + ', "layouts": {"w": {"shape": [2]}}}'), "layouts, w"),
    (edited(PLAN + ', "op": {"fc": "o@dp"}}'), '"op"'),
    (edited(PLAN + ', "ops": {"fc": "o@dp", "fc": "i@dp"}}'), "fc"),
]


@pytest.mark.parametrize(("read", "words"), REFUSED)
def test_what_is_wrong_is_refused_with_its_place_and_the_reason(read, words):
    with pytest.raises(UserError) as caught:
        read()
    assert words in str(caught.value)


def test_a_jobs_options(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(Plan(SQUARE, {"fc": "o@dp", "deep": "n@dp,tp"}, pinned=("deep",)).as_plain()))
    plan = plan_from_options(ParallelOptions(plan=str(path), pin=("fc=n@dp o@tp",)), 4)
    assert plan.ops["fc"] == "n@dp o@tp"
    assert plan.pinned == ("deep", "fc")
    with pytest.raises(UserError, match="is for 4 processes, but the run has 3"):
        plan_from_options(ParallelOptions(plan=str(path)), 3)
    assert parse_pins(("a.*=n@dp  ", " b=((1, 1), (1, 2))")) == {"a.*": "n@dp", "b": "((1, 1), (1, 2))"}
    full = plan_from_options(ParallelOptions(full_batch=True, mesh="dp=2,tp=2"), 4)
    assert resolve_letters(full, GRAPH)["input"] == ("r", "r")


def test_two_networks_under_different_plans_live_in_one_process():
    torch.manual_seed(0)
    sample, batch = torch.zeros(3, 8, 8), torch.rand(4, 3, 8, 8)
    one, other = Net(), Net()
    wanted = [net.eval()(batch) for net in (one, other)]
    mesh = Mesh((("dp", 1),))
    first = shard_by_plan(one.train(), World(), ModeRequest(plan=Plan(mesh, {"fc": "o@dp"}), picture=sample))
    second = shard_by_plan(
        other.train(), World(), ModeRequest(plan=Plan(mesh, {"fc": "i@dp", "deep": "c@dp"}), picture=sample)
    )
    assert first.layouts["fc.weight"].cuts == ((0, (0,)),)
    assert second.layouts["fc.weight"].cuts == ((1, (0,)),)
    first.close()
    for network, output in zip((first, second), wanted, strict=True):
        torch.testing.assert_close(network.call.eval()(batch), output)
