"""Plans: written, read again, edited by hand, and refused with the op and the reason."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.mesh import Mesh, TensorLayout
from manyhands.core.world import World
from manyhands.parallel.network import ModeRequest
from manyhands.parallel.options import ParallelOptions
from manyhands.parallel.plan import Plan, parse_pins, plan_from_plain, plan_of, read_plan
from manyhands.parallel.split.execute import parameter_layouts
from manyhands.parallel.split.network import split
from manyhands.parallel.split.strategy import refusal, resolve, shorten_strategies
from manyhands.parallel.split.tracing import describe_network

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


def _fails(call):
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


@settings(deadline=None)
@given(MESHES, st.data())
def test_a_concise_plan_says_all(mesh, data):
    letters = {}
    for ops in GRAPH.ties().values():
        common = sorted(set.intersection(*[set(op.allowed()) for op in ops if op.letters]))
        fitting = st.tuples(*[st.sampled_from(common) for _ in mesh.axes]).filter(
            lambda one, ops=ops: not any(refusal(op, one, mesh) for op in ops)
        )
        letters |= dict.fromkeys([op.name for op in ops], data.draw(fitting))
    default, ops = shorten_strategies(letters, GRAPH, mesh)
    plan = Plan(mesh, ops, default)
    assert resolve(plan, GRAPH) == {name: letters[name] for name in GRAPH.ops}
    again = plan_from_plain(json.loads(json.dumps(plan.as_plain())), "plan.json")
    assert resolve(again, GRAPH) == resolve(plan, GRAPH)


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


def test_a_plan_without_a_strategy_is_data_parallel():
    assert set(resolve(Plan(SQUARE), GRAPH).values()) == {("n", "n")}


def test_the_last_pattern_wins_and_globs_bind_those_who_know_the_letter():
    letters = resolve(Plan(SQUARE, {"*": "n@dp o@tp", "stem": "n@dp r@tp", "stem.0": "n@dp i@tp"}), GRAPH)
    assert letters["fc"] == ("n", "o")
    assert letters["stem.0"] == ("n", "i")
    assert letters["stem.1"] == ("n", "r")
    assert letters["deep"] == ("n", "c")
    assert letters["input"] == ("n", "n")


@pytest.mark.parametrize(
    ("mesh", "ops", "names"),
    [
        ("dp=2,tp=2", {"fc": "n@dp h@tp"}, ["fc (linear)", "the op has no dimension h", "n, r, o, i"]),
        ("dp=2,tp=4", {"fc": "i@dp,tp"}, []),
        ("dp=3,tp=2", {"fc": "o@dp,tp"}, ["fc (linear)", "5 can't be divided into 6 pieces"]),
        ("dp=3", {"deep": "c@dp"}, ["deep (conv)", "8 can't be divided into 3 equal pieces"]),
        ("dp=2", {"loss": "c@dp"}, ["loss", "the op has no dimension c", "n, r, o"]),
        ("dp=2", {"fcc": "n@dp"}, ["no op fcc", "fc"]),
        ("dp=2", {"layer9.*": "n@dp"}, ["no op layer9.*", "stem.0"]),
        ("dp=2", {"fc": "n@tp"}, ["the axis tp", "dp=2", "fc"]),
        ("dp=2", {"twice": "o@dp", "twice#2": "i@dp"}, ["twice and twice#2 share a parameter", "o and i", "o@dp"]),
        (
            "dp=2",
            {"fc": "((2, 1), (2, 1))"},
            ["input's features are split into 1 parts, but the weight's into 2", "fc"],
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_op_and_reason(mesh, ops, names):
    axes = tuple((word.split("=")[0], int(word.split("=")[1])) for word in mesh.split(","))
    plan = Plan(Mesh(axes), ops)
    if not names:
        assert resolve(plan, GRAPH)["fc"] == ("i", "i")
        return
    said = _fails(lambda: resolve(plan, GRAPH, "plan.json"))
    assert "plan.json" in said
    assert [name for name in names if name not in said] == []


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
    letters = resolve(Plan(mesh, {"matmul": "((1,1),(1,2))", "linear": "((1,2),(2,1))"}), PRODUCTS)
    assert [letters[name] for name in ("matmul", "weight", "linear", "other")] == [("o",), ("o",), ("i",), ("i",)]
    layouts = parameter_layouts(PRODUCTS, letters)
    assert layouts["weight"].cuts == ((1, (0,)),)
    assert layouts["other"].cuts == ((1, (0,)),)
    assert resolve(Plan(mesh, {"weight": "o@dp"}), PRODUCTS)["matmul"] == ("o",)


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"cumsum": "((1,1),(1,2))"}, "reads 1 tensor(s)"),
        ({"cumsum": "((1,2),)"}, "the op has no dimension c"),
        ({"relu": "((1,1),(1,2))"}, "reads 1 tensor(s)"),
        ({"relu": "((2,1,1),)"}, "would be split into (2, 1)"),
        ({"*": "h@dp"}, "have no dimension h"),
        ({"[rc]*": "v@dp"}, "the ops relu, cumsum have"),
        ({"matmul": "((1,1),(1,1,2))"}, "a tuple of 2 numbers for the weight"),
    ],
)
def test_a_pin_that_no_op_keeps_is_refused(pin, said):
    assert said in _fails(lambda: resolve(Plan(Mesh((("dp", 2),)), pin), PRODUCTS))


def test_a_shared_layer_may_be_said_once_or_twice_alike():
    for ops in ({"twice": "o@dp"}, {"twice#2": "o@dp"}, {"twice": "o@dp", "twice#2": "o@dp"}):
        letters = resolve(Plan(Mesh((("dp", 2),)), ops), GRAPH)
        assert letters["twice"] == letters["twice#2"] == ("o",)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "not valid JSON"),
        ("[]", '"format"'),
        ('{"format": "plan/2", "mesh": {"dp": 2}}', "plan/1"),
        ('{"format": "plan/1"}', '"mesh"'),
        ('{"format": "plan/1", "mesh": {}}', "one to three axes"),
        ('{"format": "plan/1", "mesh": {"dp": 0}}', "dp has size 0"),
        ('{"format": "plan/1", "mesh": {"dp": "2"}}', "dp has size"),
        ('{"format": "plan/1", "mesh": {"dp": true}}', "dp has size"),
        ('{"format": "plan/1", "mesh": {"dp": 2}, "ops": {"fc": 3}}', '"ops"'),
        ('{"format": "plan/1", "mesh": {"dp": 2}, "ops": ["fc"]}', '"ops"'),
        ('{"format": "plan/1", "mesh": {"dp": 2}, "layouts": {"w": {"shape": [2]}}}', "layouts, w"),
        ('{"format": "plan/1", "mesh": {"dp": 2}, "op": {"fc": "o@dp"}}', '"op"'),
        ('{"format": "plan/1", "mesh": {"dp": 2}, "ops": {"fc": "o@dp", "fc": "i@dp"}}', "fc"),
    ],
)
def test_a_plan_edited_wrongly_is_named(tmp_path, text, names):
    path = tmp_path / "plan.json"
    path.write_text(text)
    said = _fails(lambda: read_plan(path))
    assert names in said
    assert str(path) in said
    assert str(tmp_path / "no.json") in _fails(lambda: read_plan(tmp_path / "no.json"))


def test_a_jobs_options(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(Plan(SQUARE, {"fc": "o@dp", "deep": "n@dp,tp"}, pinned=("deep",)).as_plain()))
    plan = plan_of(ParallelOptions(plan=str(path), pin=("fc=n@dp o@tp",)), 4)
    assert plan.ops["fc"] == "n@dp o@tp"
    assert plan.pinned == ("deep", "fc")
    assert "is for 4 processes, but the run has 3" in _fails(lambda: plan_of(ParallelOptions(plan=str(path)), 3))
    assert "not a pin" in _fails(lambda: plan_of(ParallelOptions(pin=("fc",)), 2))
    assert parse_pins(("a.*=n@dp  ", " b=((1, 1), (1, 2))")) == {"a.*": "n@dp", "b": "((1, 1), (1, 2))"}
    full = plan_of(ParallelOptions(full_batch=True, mesh="dp=2,tp=2"), 4)
    assert resolve(full, GRAPH)["input"] == ("r", "r")
    both = ParallelOptions(full_batch=True, mesh="dp=2", pin=("input=n@dp",))
    assert "can't be combined" in _fails(lambda: plan_of(both, 2))


def test_two_networks_under_different_plans_live_in_one_process():
    torch.manual_seed(0)
    sample, batch = torch.zeros(3, 8, 8), torch.rand(4, 3, 8, 8)
    one, other = Net(), Net()
    wanted = [net.eval()(batch) for net in (one, other)]
    mesh = Mesh((("dp", 1),))
    first = split(one.train(), World(), ModeRequest(plan=Plan(mesh, {"fc": "o@dp"}), picture=sample))
    second = split(other.train(), World(), ModeRequest(plan=Plan(mesh, {"fc": "i@dp", "deep": "c@dp"}), picture=sample))
    assert first.layouts["fc.weight"].cuts == ((0, (0,)),)
    assert second.layouts["fc.weight"].cuts == ((1, (0,)),)
    first.close()
    for network, output in zip((first, second), wanted, strict=True):
        torch.testing.assert_close(network.call.eval()(batch), output)
