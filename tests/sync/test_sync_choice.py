"""Which sync method suits a link and a mode: laws of what methods cost, and of the choice between them."""

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchvision.models import resnet18

from manyhands.config.job import Job, TrainOptions
from manyhands.config.load import load_job
from manyhands.core.choices import load_choice, module_names
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.apply import resolve_mode
from manyhands.parallel.options import MODES
from manyhands.sync import costs
from manyhands.sync.choose import EXACT, choose_method, cost_label, run_days
from manyhands.sync.link_speeds import LinkSpeed, parse_link
from manyhands.sync.options import METHODS, SyncOptions
from manyhands.train import choose_sync
from manyhands.train.choose_sync import check_sync_and_mode, has_sync_choice, previous_cost
from manyhands.worker.plan_advice import append_sync_choice, choice_as_plain

_MODEL = resnet18()
RESNET18 = tuple(tuple(one.shape) for one in _MODEL.parameters())
BUFFERS = sum(one.numel() for one in _MODEL.buffers())
LOCAL = "local"
CODECS = ("none", "bf16", "int8", "int4", "lowrank")

shapes = st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8).map(tuple)
links = st.builds(LinkSpeed, st.floats(1e4, 1e11), st.floats(0, 0.2))
steps_s = st.floats(1e-3, 10)


def case_of(link, step_s=1.0, steps=100_000, machines=3):
    return costs.LinkCase(RESNET18, 4, BUFFERS, machines, step_s, step_s / 2, link, steps)


@st.composite
def cases(draw, fewest=2, most=64):
    step_s = draw(steps_s)
    return costs.LinkCase(
        draw(st.one_of(shapes, st.just(RESNET18))), draw(st.sampled_from([4, 8])), draw(st.integers(0, 20_000)),
        draw(st.integers(fewest, most)), step_s, step_s * draw(st.floats(0, 1)), draw(links),
        draw(st.integers(1, 10**7)),
    )  # fmt: skip


options = st.builds(
    SyncOptions,
    codec=st.sampled_from(("auto", *CODECS)),
    every=st.integers(0, 500),
    delay=st.integers(-1, 500),
    rank=st.integers(1, 16),
)


@given(cases(), options)
def test_exactness_may_cost_a_tenth_and_accuracy_half_or_two_minutes(case, wanted):
    choice = choose_method(case, wanted)
    assert choice.chosen in choice.costs
    for cost in choice.costs:
        share = 0.5 if cost.method == LOCAL != choice.chosen.method else 0.1
        lost_s = choice.chosen.step_s - cost.step_s
        if choice.chosen.method == LOCAL != cost.method:
            assert lost_s <= 0, "local steps are for those who gain by them"
        assert lost_s <= max(0.002, (share + 1e-7) * cost.step_s) or lost_s * case.steps < 120
    assert cost_label(choice.chosen) in choice.reason
    assert f"{case.link.bytes_per_s * 8e-6:.4g} Mbit/s" in choice.reason


@given(cases(), st.floats(1, 1e4), options)
def test_more_bandwidth_makes_no_method_slower(case, factor, wanted):
    faster = replace(case, link=LinkSpeed(case.link.bytes_per_s * factor, case.link.latency_s))
    for slow, fast in zip(choose_method(case, wanted).costs, choose_method(faster, wanted).costs, strict=True):
        assert (slow.method, slow.codec) == (fast.method, fast.codec)
        # Local steps use a faster link to agree more often, whose compressing may cost so much.
        more = 0.04 if fast.method == LOCAL and fast.every < slow.every else 1e-9
        assert fast.step_s <= slow.step_s * (1 + more)


@given(cases(), options)
def test_no_step_is_shorter_than_computing_it_and_what_is_sent_takes_its_time(case, wanted):
    for cost in choose_method(case, wanted).costs:
        assert cost.step_s >= case.step_s
        assert 0 <= cost.delay <= cost.every
        # However well it is hidden, a link that always sends is the limit.
        hidden = case.backward_s if cost.method in {"allreduce", "bf16"} else 0.0
        assert cost.sent_bytes / case.link.bytes_per_s <= (cost.step_s + hidden) * (1 + 1e-9)


@given(cases(fewest=1), options)
def test_one_machine_and_a_link_without_limits_keep_allreduce(case, wanted):
    assert choose_method(replace(case, link=LinkSpeed(1e18, 0.0)), wanted).chosen.method == "allreduce"
    alone = choose_method(replace(case, machines=1), wanted)
    assert alone.chosen.method == "allreduce"
    assert {(cost.step_s, cost.sent_bytes) for cost in alone.costs} == {(case.step_s, 0.0)}


@given(cases(), st.integers(1, 16))
def test_local_steps_keep_to_what_accuracy_needs(case, rank):
    for cost in load_choice(METHODS, LOCAL).estimate(case, SyncOptions(rank=rank)):
        assert cost.every == 1 or (cost.every <= 256 and case.steps / cost.every >= 60)


@given(cases(), st.sampled_from(CODECS), st.integers(1, 400), st.integers(0, 400))
def test_what_a_user_says_of_local_steps_is_kept(case, codec, every, delay):
    (cost,) = load_choice(METHODS, LOCAL).estimate(case, SyncOptions(codec=codec, every=every, delay=delay))
    assert (cost.codec, cost.every, cost.delay) == (codec, every, min(delay, every))


@given(st.integers(2, 50), st.integers(1, 32))
def test_bytes_are_those_of_the_messages(machines, rank):
    case = case_of(LinkSpeed(1e6, 0.0), machines=machines)
    values = sum(math.prod(shape) for shape in RESNET18)
    statistics = 2 * (machines - 1) / machines * 8 * BUFFERS
    ranks = costs.low_rank_layout(RESNET18, rank)
    control = 2 * (machines - 1) * 220
    thin = (
        sum(costs.mean_bytes(ranks.values(turn), machines, costs.FACTOR_VALUE_BYTES) for turn in (0, 1)) / 2 + control
    )
    by_method = {
        (cost.method, cost.codec): cost for cost in choose_method(case, SyncOptions(rank=rank, every=10)).costs
    }
    int4 = costs.mean_bytes(values, machines, costs.value_bytes("int4", 4)) + control
    expected = {
        ("allreduce", "none"): 2 * (machines - 1) / machines * 4 * values + statistics,
        ("bf16", "none"): 2 * (machines - 1) / machines * 2 * values + statistics,
        ("local", "lowrank"): thin / 10,
        ("local", "int4"): int4 / 10,
    }
    assert {key: by_method[key].sent_bytes for key in expected} == pytest.approx(expected)
    # In batches, of which each is filled up and has its own messages.
    number = len(costs.divide_into_batches(RESNET18, rank))
    assert thin <= by_method["powersgd", "none"].sent_bytes <= thin + number * (control + 2 * (machines - 1) * 2 * 258)


@given(shapes, st.integers(1, 16))
def test_batches_have_every_tensor_once_and_turns_send_about_equally_much(shapes, rank):
    places = costs.divide_into_batches(shapes, rank)
    assert [place for batch in places for place in batch] == list(reversed(range(len(shapes))))
    ranks = costs.low_rank_layout(shapes, rank)
    for matrix in ranks.matrices:
        assert matrix.rows * matrix.columns == math.prod(shapes[matrix.place])
        assert matrix.rank >= rank
        assert 2 * matrix.rank * (matrix.rows + matrix.columns) <= matrix.rows * matrix.columns
    longest = max((one.rank * abs(one.rows - one.columns) for one in ranks.matrices), default=0)
    assert abs(ranks.values(0) - ranks.values(1)) <= longest


def test_resnet18_on_three_machines():
    slow = choose_method(case_of(parse_link("10mbit"), 0.15), SyncOptions())
    assert slow.chosen.method == "powersgd"
    slower = choose_method(case_of(parse_link("1mbit"), 0.15), SyncOptions()).chosen
    assert (slower.method, slower.codec) == ("local", "lowrank")
    assert slow.costs[0].step_s == pytest.approx(55, rel=0.1)
    assert run_days(slow.costs[0], case_of(parse_link("10mbit"), 0.15)) == pytest.approx(61, rel=0.1)
    assert choose_method(case_of(parse_link("1gbit"), 1.0), SyncOptions()).chosen.method == "allreduce"
    short = choose_method(case_of(parse_link("100mbit"), 1.0, steps=20), SyncOptions())
    assert short.chosen.method == "allreduce"


def test_what_the_table_and_the_plan_say_is_what_was_estimated():
    case = case_of(parse_link("10mbit"), 0.15)
    choice = choose_method(case, SyncOptions())
    plain = choice_as_plain(choice, case, "allreduce")
    assert json.loads(json.dumps(plain)) == plain
    for row, cost in zip(plain["methods"], choice.costs, strict=True):
        assert (row["method"], row["step_s"]) == (cost.method, cost.step_s)
        assert row["sent_mb"] * 1e6 == pytest.approx(cost.sent_bytes)
        assert row["chosen"] == (cost is choice.chosen)
    assert plain["reason"] == choice.reason
    assert append_sync_choice("kept", plain) == f"kept\n--sync auto would choose another method: {choice.reason}"
    assert append_sync_choice("kept", {**plain, "asked": choice.chosen.method}) == "kept"


def test_what_the_job_rules_out_is_shown_with_its_reason_and_never_chosen():
    case, out = case_of(parse_link("10mbit"), 0.15), {"local": "not with a global norm_group"}
    choice = choose_method(case, SyncOptions(), without=out)
    assert choice.chosen.method == "powersgd"
    assert {cost.method for cost in choice.costs if cost.refused} == {"local"}
    rows = choice_as_plain(choice, case, "auto")["methods"]
    assert [row["refused"] for row in rows if row["method"] == "local"] == [out["local"]] * 3


@given(cases(), options)
def test_a_decision_is_found_again_in_a_checkpoint(case, wanted):
    chosen = choose_method(case, wanted).chosen
    job = Job(sync=wanted.model_copy(update={"method": "auto"}))
    kept = json.loads(json.dumps({**asdict(chosen), "processes": case.machines}))
    assert previous_cost(kept, job, case.machines) == chosen
    assert previous_cost(kept, job, case.machines + 1) is None


def test_a_decision_does_not_outlive_what_rules_it_out():
    kept = {**asdict(costs.Cost("powersgd", 1.0, 1.0)), "processes": 3}
    assert previous_cost(kept, Job(sync=SyncOptions(method="auto")), 3)
    assert previous_cost(kept, Job(sync=SyncOptions(method="auto"), train=TrainOptions(precision="fp16")), 3) is None
    for wrong in (None, "auto", [], {**kept, "method": "magic"}, {**kept, "every": 1e999}, {**kept, "delay": 2}):
        assert previous_cost(wrong, Job(sync=SyncOptions(method="auto")), 3) is None


# The others average gradients by themselves.
TAKE_ALL = {"single", "data"}


@pytest.mark.parametrize("mode", module_names(MODES))
def test_each_combination_is_taken_or_refused_by_name(mode):
    check_sync_and_mode("auto", mode)
    assert has_sync_choice(mode) == (mode in TAKE_ALL)
    for method in module_names(METHODS):
        if mode in TAKE_ALL or method == EXACT:
            check_sync_and_mode(method, mode)
        else:
            what = f"{mode} can't be combined with --sync {method}, which (averages|needs)"
            with pytest.raises(UserError, match=what) as caught:
                check_sync_and_mode(method, mode)
            assert caught.value.hints == ("set --parallel data", "or set --sync allreduce")
    if mode == "single":
        with pytest.raises(UserError, match="single runs as one process, but 2 processes"):
            resolve_mode(mode, World(0, 2))


@pytest.mark.parametrize("method", module_names(METHODS))
def test_each_method_says_what_it_does_and_what_it_costs(method):
    choice = load_choice(METHODS, method)
    assert bool(getattr(choice, "EXCEPTION", "")) != choice.EXACT
    case = costs.LinkCase(((64, 64), (64,)), 4, 10, 2, 1.0, 0.5, LinkSpeed(1e6, 1e-4), 1000)
    for cost in choice.estimate(case, SyncOptions()):
        assert cost.method == method
        assert cost.sent_bytes > 0


@pytest.mark.parametrize("method", ["auto", "local"])
def test_delays_longer_than_the_pace_are_refused_before_anything_is_timed(method):
    job = load_job({"sync.method": method, "sync.every": 5, "sync.delay": 20}, environment={}).job
    with pytest.raises(UserError, match="the delay of 20 steps exceeds"):
        choose_sync._requested_sync(job, "data")
