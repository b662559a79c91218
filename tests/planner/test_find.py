"""Finding plans of networks: never above those by hand, within memory, and data parallel unless it is beaten."""

import itertools
import math
import tomllib
from dataclasses import replace
from importlib import resources

import platformdirs
import pytest
import torch
import torchvision.models as zoo
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import manyhands
from manyhands.core.errors import UserError
from manyhands.data.order import equal_share_function
from manyhands.parallel.plan import Plan
from manyhands.parallel.split.strategy import resolve_letters
from manyhands.planner.choose import DATA_PARALLEL, pick_measured, pick_predicted, time_in_rounds
from manyhands.planner.cost import CostInputs, ShardedOpTimes, sharding_problem
from manyhands.planner.device_models import REACHED_OPERATIONS, load_device_model
from manyhands.planner.find import (
    GAP,
    SearchRequest,
    fewer_counts,
    graph_digest,
    needed_count,
    one_weird_trick,
    search_plans,
)
from manyhands.planner.links import mesh_links
from manyhands.planner.solve import NoPlanError, evaluate, solve_all
from manyhands.planner.timing import OpTimes, Timing
from manyhands.sync.link_speeds import LinkSpeed
from tests.planner.nets import chain, choices_of, graph_of, heavy, mesh_of

HEAVY, CHAIN = graph_of(heavy()), graph_of(chain(), channels=4)
RESNET = graph_of(zoo.resnet18(), 64)


def links_at(bytes_per_s, latency_s=1e-4, *work_s):
    return lambda mesh: mesh_links(mesh, per_machine=1, between=LinkSpeed(bytes_per_s, latency_s, *work_s))


slow = links_at(12.5e6)


@pytest.mark.parametrize(
    ("graph", "sizes"), [*itertools.product([HEAVY, CHAIN], [(2,), (4, 2), (2, 2, 2)]), (RESNET, (2, 2))]
)
def test_the_search_is_never_above_what_is_written_by_hand(graph, sizes):
    mesh = mesh_of(sizes)
    setting = CostInputs(
        ShardedOpTimes(graph, 64, mesh.size, OpTimes(budget_s=0.0)), slow(mesh), equal_share_function(64, 0)
    )
    one = sharding_problem(graph, setting)
    ((found,), _) = solve_all([one.problem], gap=GAP)
    hands = [Plan(mesh), Plan(mesh, default=f"r@{','.join(mesh.names)}")]
    written = [resolve_letters(plan, graph) for plan in hands]
    written += [trick for trick in [one_weird_trick(graph, mesh)] if trick]
    assert len(written) >= 2
    for letters in written:
        assert found.seconds <= evaluate(one.problem, choices_of(one, letters)).seconds * (1 + GAP)


def test_a_fully_connected_network_on_a_slow_link_is_not_data_parallel():
    found = search_plans(HEAVY, SearchRequest(8, 64), links=slow)
    assert found.pick.name != DATA_PARALLEL
    assert "x as fast" in found.pick.reason
    data = found.options[0]
    assert data.name == DATA_PARALLEL
    assert found.chosen.prediction.seconds < data.prediction.seconds
    assert found.chosen.prediction.sent_bytes < data.prediction.sent_bytes / 2


def test_resnet_stays_data_parallel_with_the_reason():
    found = search_plans(RESNET, SearchRequest(4, 256))
    assert found.pick.name == DATA_PARALLEL
    assert found.pick.reason.startswith("data parallel is kept")
    assert found.plan.about["mode"] == "data"
    assert found.plan.ops == {}


@pytest.mark.parametrize(("world_size", "links"), [(2, mesh_links), (4, slow), (8, slow)])
def test_a_candidates_plan_says_its_letters_and_finalists_hold_data_parallel_and_the_best(world_size, links):
    found = search_plans(HEAVY, SearchRequest(world_size, 64), links=links)
    assert all(resolve_letters(found.candidate_plan(option), HEAVY) == option.letters for option in found.options)
    assert len({option.name for option in found.options}) == len(found.options)
    names = [option.name for option in found.finalists(2)]
    assert {DATA_PARALLEL, found.chosen.name} <= set(names)
    assert len(names) <= 3


@settings(max_examples=12)
@given(
    st.sampled_from(["4", "6", "[46]"]),
    st.sampled_from(["n@dp o@tp", "i@tp", "o@dp,tp", "r@dp", "i@dp n@tp"]),
    st.sampled_from(["search", "data"]),
)
def test_pins_are_kept(pattern, strategy, fill):
    request = SearchRequest(4, 64, mesh_of((2, 2)), {pattern: strategy}, fill=fill)
    found = search_plans(HEAVY, request, links=slow)
    assert found.pick.name != DATA_PARALLEL
    letters = resolve_letters(found.plan, HEAVY)
    for part in strategy.split():
        letter, _, axes = part.partition("@")
        for axis in axes.split(","):
            for op in HEAVY.ops_matching(pattern):
                assert letters[op.name][("dp", "tp").index(axis)] == letter
    if fill == "data":
        assert all(set(letters[name]) == {"n"} for name in ("0", "1", "loss"))


def test_meshes_without_a_pins_axis_are_left_out():
    found = search_plans(HEAVY, SearchRequest(8, 64, pins={"6": "o@tp"}))
    assert all("tp" in option.mesh.names for option in found.options if option.allowed)
    assert not found.options[0].allowed
    assert DATA_PARALLEL not in [option.name for option in found.finalists()]


def test_memory_is_kept_to():
    free = search_plans(HEAVY, SearchRequest(4, 64))
    assert free.pick.name == DATA_PARALLEL or free.chosen.prediction.seconds < free.options[0].prediction.seconds
    limit = int(free.options[0].prediction.memory_bytes * 0.6)
    tight = search_plans(HEAVY, SearchRequest(4, 64, memory_limit_bytes=limit))
    assert not tight.options[0].fits
    assert tight.chosen.prediction.memory_bytes <= limit
    assert "data parallel can't run" in tight.pick.reason
    assert "into 1 GiB per process; the smallest takes 4 GiB" in str(NoPlanError(1 << 30, 4 << 30))
    with pytest.raises(NoPlanError, match="GiB") as caught:
        search_plans(HEAVY, SearchRequest(4, 64, memory_limit_bytes=1000))
    # The error names the least of all meshes: with that much there is a plan.
    least = int(caught.value.least_memory_bytes)
    assert search_plans(HEAVY, SearchRequest(4, 64, memory_limit_bytes=least)).chosen.prediction.memory_bytes <= least
    with pytest.raises(NoPlanError):
        search_plans(HEAVY, SearchRequest(4, 64, memory_limit_bytes=least - 1))


def test_another_network_has_another_digest():
    assert graph_digest(HEAVY) == graph_digest(graph_of(heavy()))
    assert graph_digest(HEAVY) != graph_digest(CHAIN)


def test_from_python():
    model = heavy().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = manyhands.find_plan(
        model, torch.zeros(64, 3, 32, 32), world_size=4, mesh="dp=2,tp=2", link="100mbit", pin={"6": "n@dp o@tp"}
    )
    assert str(plan.mesh) == "dp=2,tp=2"
    assert plan.pinned == ("6",)
    assert plan.about["graph"]["samples"] == 64
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    free = manyhands.find_plan(model, torch.zeros(3, 32, 32), world_size=2, link="100mbit", memory="1GiB")
    assert free.about["graph"]["samples"] == 64
    with pytest.raises(UserError, match="memory"):
        manyhands.find_plan(model, torch.zeros(3, 32, 32), memory="much")


def fewest(found, spread=0.0):
    fewer = found.predict_fewer(dict.fromkeys(fewer_counts(found.request.world_size)))
    return needed_count(found, fewer, found.chosen.prediction.seconds, spread)


def test_of_fewer_processes_those_are_looked_at_that_may_do():
    assert [fewer_counts(number) for number in (2, 4, 12)] == [[1], [1, 2, 3], [1, 3, 6]]
    # A plan that sends nothing is one machine's; on a fast link all are needed.
    found = search_plans(CHAIN, SearchRequest(4, 64), links=links_at(1e3))
    assert found.chosen.prediction.sent_bytes == 0
    count, why = fewest(found)
    assert count == 1
    assert "repeats every computation" in why
    assert fewest(search_plans(CHAIN, SearchRequest(4, 64), links=links_at(1e15)))[0] == 0


def test_fewer_processes_are_recommended_where_they_are_clearly_faster_beyond_what_was_timed_varies():
    """On a slow link, where data parallel is taken."""
    found = search_plans(HEAVY, SearchRequest(4, 64), links=links_at(1e4))
    found = replace(found, pick=replace(found.pick, name=DATA_PARALLEL))
    count, why = fewest(found)
    assert (count, "one process" in why) == (1, True)
    one, two = found.predict_fewer({1: None, 2: None})

    def taken(seconds, spread=0.0, all_s=5.0):
        options = [
            replace(option, prediction=replace(one.prediction, compute_seconds=took_s))
            for option, took_s in zip((one, two), seconds, strict=False)
        ]
        return needed_count(found, options, all_s, spread)

    assert [taken([1.0], spread, all_s=1.0)[0] for spread in (0.0, 0.2)] == [1, 0]
    # A clearly faster number goes before a smaller one.
    assert taken([1.0, 0.6])[0] == 2
    assert taken([1.0, 0.6])[1].startswith(
        "data parallel on 2 takes 600 ms per step, while data parallel on 4 takes 5 s"
    )
    assert taken([1.0, 0.95])[0] == taken([1.0, 1.2])[0] == taken([1.0, 0.8], spread=0.25)[0] == 1


def test_a_share_that_was_timed_scales_all_plans_alike():
    plain = search_plans(CHAIN, SearchRequest(4, 64))
    timed = search_plans(CHAIN, SearchRequest(4, 64), share=Timing(7.0, 0.25))
    assert timed.options[0].prediction.compute_seconds == pytest.approx(7.0)
    assert timed.spread == 0.25
    scale = 7.0 / plain.options[0].prediction.compute_seconds
    (scaled,), (estimated,), (own,) = (
        timed.predict_fewer({1: None}),
        plain.predict_fewer({1: None}),
        timed.predict_fewer({1: Timing(20.0)}),
    )
    assert scaled.prediction.compute_seconds == pytest.approx(scale * estimated.prediction.compute_seconds)
    assert own.prediction.compute_seconds == 20.0


def test_work_hides_behind_nothing():
    idle, busy = (
        search_plans(HEAVY, SearchRequest(2, 4096), links=links_at(1e9, 1e-5, *work)) for work in ((), (1e-9, 1e-6))
    )
    assert busy.options[0].prediction.gradient_seconds > idle.options[0].prediction.gradient_seconds


OURS = tomllib.loads(resources.files("manyhands.planner").joinpath("device_models.toml").read_text(encoding="utf-8"))


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_config_path", lambda name: tmp_path)
    return tmp_path / "device-models.toml"


def test_each_bundled_device_model_is_complete_and_has_a_source(own):
    for found in map(load_device_model, map(str.upper, OURS)):
        assert found.source
        assert found.memory_bytes >= 16e9
        for precision, rate in found.operations.items():
            assert found.rates(precision)[0] == pytest.approx(REACHED_OPERATIONS * rate)
            assert found.source in found.describe_source(precision)
            assert "estimated" in found.describe_source(precision)
    assert {"h100", "a100", "910b", "rtx4090"} <= set(OURS)


def test_users_add_their_own(own):
    own.write_text(
        '[mine]\nname = "My own"\nmemory = "8GB"\nbandwidth = 1e11\nwithin = 1e10\n'
        'operations = { fp32 = 1e13 }\nsource = "measured"\n',
        encoding="utf-8",
    )
    assert load_device_model("mine").name == "My own"
    assert load_device_model("h100").name == "NVIDIA H100 SXM"
    for content in ("[mine", "[mine]\nname = 3", "[mine]\nmemory = '8GB'", "mine = 3"):
        own.write_text(content, encoding="utf-8")
        with pytest.raises(UserError) as error:
            load_device_model("mine")
        assert str(own) in f"{error.value.where} {error.value.message}"
    own.unlink()
    with pytest.raises(UserError, match="h1000") as error:
        load_device_model("h1000")
    assert "h100" in " ".join(error.value.hints)


def test_a_faster_device_makes_shorter_steps_and_nothing_is_measured(own, tmp_path):
    slow, fast = (
        search_plans(
            CHAIN,
            SearchRequest(2, 64, accelerator=True),
            OpTimes(folder=tmp_path, rates=load_device_model(name).rates("fp32")),
        )
        for name in ("t4", "h100")
    )
    assert fast.options[0].prediction.compute_seconds < slow.options[0].prediction.compute_seconds
    assert not list(tmp_path.glob("ops-*"))


class WithIndices(nn.Module):
    """A table of positions [tokens, tokens] picks biases, as in Swin; a mask is inverted; forward takes more words."""

    def __init__(self):
        super().__init__()
        self.biases = nn.Parameter(torch.zeros(7))
        self.register_buffer("positions", torch.arange(16).reshape(4, 4) % 7)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.last = nn.Linear(4, 3)

    def forward(self, x, mask=None, scale: float = 2.0):
        x = x.mean((2, 3)) * scale if mask is None else x * mask
        x = x + self.biases[self.positions].sum(0)
        return self.last(x * (~self.mask).float())


class Net(nn.Module):
    """Layers and parameters by name, and a function of them and of the pictures."""

    def __init__(self, compute, **parts):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.compute(self, x)


def draws(net, x):
    """Draws in place, which a made-up input that wants a gradient doesn't take."""
    x = net.last(x.mean((2, 3)))
    return x * x.new_empty(x.shape[0], 1).bernoulli_(1.0)


def test_buffers_are_read_as_they_are_and_further_arguments_keep_their_defaults(tmp_path):
    graph = graph_of(WithIndices(), size=8, channels=4)
    assert [op.name for op in graph.ops.values() if op.name.startswith("input")] == ["input"]
    found = search_plans(graph, SearchRequest(2, 8), OpTimes(folder=tmp_path))
    assert found.notes == ()


def test_an_op_that_can_not_be_timed_is_priced_by_its_size_and_named(tmp_path):
    times = OpTimes(folder=tmp_path)
    network = Net(draws, last=nn.Linear(4, 3))
    found = search_plans(graph_of(network, size=8, channels=4), SearchRequest(2, 8), times)
    (note,) = found.notes
    assert note.startswith("bernoulli can't be timed; the cost is estimated from the size (RuntimeError: ")
    assert (len(times.failed), times.estimated) == (1, 1)
    times.save()
    assert all("bernoulli" not in line for line in times.file.read_text().splitlines())


def test_layers_are_described_without_computing_them():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    for parameter in network.parameters():
        nn.init.constant_(parameter, torch.nan)
    graph = graph_of(network, size=8)
    assert all(op.batchwise and op.batched for op in graph.ops.values() if op.extents)
    assert [op.extent.dims for op in graph.ops.values() if op.extents][1:] == [(3, 8, 6, 6)] * 3 + [(3, 288), (3, 4)]


def conv(outputs=4):
    return nn.Conv2d(3, outputs, 1)


RAW, MIXES = nn.Parameter(torch.randn(1, 3, 4, 4)), "the network mixes samples"


@pytest.mark.parametrize(
    ("network", "size", "read", "expected"),
    [
        # A convolution of parameters is no batch.
        (
            Net(lambda net, x: (x * net.conv(net.raw)).flatten(1), raw=RAW, conv=conv(3)),
            *(4, lambda ops: (ops["conv"].batched, ops["mul"].batchwise), (False, True)),
        ),
        # What layers are thought to give shows mixing behind them, and mixing before a layer is seen all the same.
        (
            Net(lambda net, x: torch.cumsum(net.first(x) - net.second(x), 0).flatten(1), first=conv(), second=conv()),
            *(4, lambda ops: (ops["sub"].batchwise, ops["cumsum"].batchwise), (True, False)),
        ),
        (
            Net(lambda net, x: net.conv(x - x.mean(0, keepdim=True)).flatten(1), conv=conv()),
            *(4, lambda ops: ops["conv"].batchwise, False),
        ),
        # What carries from sample to sample mixes them, in either direction.
        *(
            (network, 2, lambda ops: ops["loss"].letters["n"], MIXES)
            for network in (
                Net(lambda net, x: net.recurrent(x.flatten(1)[:, None])[0][:, 0], recurrent=nn.LSTM(12, 5)),
                Net(lambda net, x: net.fc(x.flatten(1)).cumsum(0), fc=nn.Linear(12, 5)),
                Net(lambda net, x: net.fc(x.flatten(1)).flip(0).cumsum(0).flip(0), fc=nn.Linear(12, 5)),
            )
        ),
    ],
)
def test_what_mixes_samples_is_seen_op_by_op(network, size, read, expected):
    assert read(graph_of(network, size).ops) == expected


times = st.lists(st.floats(0.01, 10), min_size=3, max_size=9)


def test_all_are_timed_in_turns_and_the_first_round_is_not_counted():
    called = []

    def measure(plan):
        called.append(plan)
        return float(len(called))

    seconds = time_in_rounds(["a", "b", "c"], measure, rounds=3)
    assert called == list("cbaabccbaabc")
    assert seconds == {"a": [4, 9, 10], "b": [5, 8, 11], "c": [6, 7, 12]}


@given(times, st.one_of(st.floats(1.04, 50), st.floats(0.1, 1.02)))
def test_a_plan_that_is_always_clearly_faster_is_chosen_however_the_machine_slows(base, gain):
    pick = pick_measured({DATA_PARALLEL: base, "cut": [value / gain for value in base]})
    assert pick.name == ("cut" if gain > 1.03 else DATA_PARALLEL)
    assert "cut" in pick.reason
    assert float(pick.reason.split("measured ")[1].split("x")[0]) == pytest.approx(gain, abs=0.006)


@given(times, st.permutations(["a", "b", "c"]), st.randoms())
def test_the_order_of_the_finalists_does_not_matter(base, names, random):
    seconds = {name: [random.uniform(0.1, 2) for _ in base] for name in sorted(names)} | {DATA_PARALLEL: base}
    assert pick_measured(seconds).name == pick_measured({name: seconds[name] for name in [DATA_PARALLEL, *names]}).name


def test_a_gain_within_noise_is_none():
    noisy = [1.0, 3.0, 0.5, 2.8, 0.6, 1.2]
    pick = pick_measured({DATA_PARALLEL: [1.0] * 6, "cut": noisy})
    assert pick.name == DATA_PARALLEL
    assert pick_measured({DATA_PARALLEL: [1.1] * 6, "cut": [1.0, 1.01, 0.99, 1.0, 1.02, 1.0]}).name == "cut"


def test_where_data_parallel_cannot_run_the_fastest_is_chosen_and_too_few_rounds_are_refused():
    pick = pick_measured({DATA_PARALLEL: [math.inf] * 3, "a": [2.0] * 3, "b": [1.0] * 3})
    assert (pick.name, "can't run" in pick.reason) == ("b", True)
    for seconds in ({DATA_PARALLEL: [1.0] * 2}, {DATA_PARALLEL: [1.0] * 3, "cut": [1.0] * 4}):
        with pytest.raises(UserError, match="the same number of times"):
            pick_measured(seconds)


@given(st.floats(0.1, 2), st.floats(0, 1))
def test_predictions_must_promise_more_than_they_and_timings_vary(seconds, doubtful):
    slowest = max(1.1 * seconds, seconds + doubtful)
    assume(abs(slowest - 1) > 1e-9)
    pick = pick_predicted({DATA_PARALLEL: 1.0, "cut": seconds}, {"cut": doubtful})
    assert pick.name == ("cut" if slowest < 1 else DATA_PARALLEL)
    assert pick.name in pick.reason
