"""Choices by measurement: precision and layout follow from the kinds of machines alone, shares from their speeds."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.config.job import TrainOptions
from manyhands.core.machine import parse_cpuinfo
from manyhands.train.precision import MachineKind, Variant, choose_variant, time_variants, variants_of
from manyhands.train.shares import balanced

BOTH = TrainOptions(precision="auto", channels_last="auto")
VARIANTS = ["fp32 contiguous", "fp32 channels_last", "bf16 contiguous", "bf16 channels_last"]


def kind(*seconds, bf16=True, name="one", **failed):
    return MachineKind(name, bf16, {key: one for key, one in zip(VARIANTS, seconds, strict=False) if one}, failed)


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ((4.0, 4.0, 3.1, 3.1), Variant("fp32", False)),  # 1.29
        ((4.0, 4.0, 3.0, 3.0), Variant("bf16", False)),  # 1.33
        ((4.0, 3.9, 3.9, 2.0), Variant("bf16", True)),  # the layout pays under bf16 alone
        ((4.0, 2.5, 2.0, 2.0), Variant("fp32", True)),  # the best of each precision are compared
        ((4.0, 0.0, 2.0, 0.0), Variant("bf16", False)),  # it can't run in the other layout
        ((4.0, 3.0, 0.0, 0.0), Variant("fp32", True)),  # it can't run in bf16
    ],
)
def test_bf16_and_the_layout_are_taken_where_they_pay(seconds, taken):
    cannot = {key: "no" for key, one in zip(VARIANTS, seconds, strict=True) if not one}
    found, said = choose_variant(BOTH, [kind(*seconds, **cannot)])
    assert found == taken
    assert [f"train.precision is {taken.precision}" in said[0], "train.channels_last is" in said[1]] == [True, True]


def test_what_no_machine_measured_or_computes_itself_is_not_taken():
    for one in (kind(), kind(**dict.fromkeys(VARIANTS, "the labels are wrong"))):
        assert choose_variant(BOTH, [one]) == (Variant("fp32", False), [])
    found, said = choose_variant(BOTH, [kind(4.0, 4.0, 1.0, 1.0, bf16=False, name="old")])
    assert found == Variant("fp32", False)
    assert said[0] == "train.precision is fp32: old has no native bf16"
    assert all("bf16" not in str(one) for one in variants_of(BOTH, bf16=False))


def test_all_kinds_of_machines_must_gain_in_any_order():
    fast, slow, without = kind(4.0, 2.0, 1.0, 0.9), kind(4.0, 4.0, 3.9, 3.9), kind(4.0, 2.0, bf16=False, name="old")
    for several, taken in (((fast, slow), "fp32"), ((fast, without), "fp32"), ((fast, fast), "bf16")):
        for order in itertools.permutations(several):
            assert choose_variant(BOTH, order)[0].precision == taken


def test_what_the_user_says_is_never_decided():
    seconds = kind(4.0, 1.0, 1.0, 4.0)
    assert choose_variant(TrainOptions(precision="auto", channels_last=True), [seconds])[0] == Variant("fp32", True)
    assert choose_variant(TrainOptions(precision="bf16", channels_last="auto"), [seconds])[0] == Variant("bf16", False)
    fp64 = TrainOptions(precision="fp64", channels_last="auto")
    assert variants_of(fp64, bf16=True) == [Variant("fp64", False), Variant("fp64", True)]


def test_one_that_fails_or_gives_no_number_is_left_out_and_the_others_are_timed():
    def refuses():
        raise RuntimeError("view size is not compatible\nand more")

    runs = {
        Variant("fp32", False): lambda: torch.tensor(1.0),
        Variant("fp32", True): refuses,
        Variant("bf16", False): lambda: torch.tensor(float("nan")),
    }
    trials = {variant: (lambda: None, run) for variant, run in runs.items()}
    threads = torch.get_num_threads()
    seconds, failed = time_variants(trials, "cpu")
    assert seconds.keys() == {"fp32 contiguous"}
    assert failed == {
        "fp32 channels_last": "RuntimeError: view size is not compatible",
        "bf16 contiguous": "the loss is not finite",
    }
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("text", "bf16"),
    [
        ("processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 avx512f avx512_bf16\n\nprocessor\t: 1\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd40\n", True),
        ("nothing of that kind", False),
    ],
)
def test_what_the_system_says_of_a_processor(text, bf16):
    found, less = parse_cpuinfo(text), parse_cpuinfo(text.replace("bf16", ""))
    assert (found.bf16, less.bf16) == (bf16, False)
    assert (found.name != less.name) == bf16


# Shares of a batch by measured speed: complete, within limits, and none that another process would finish sooner.
speeds = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8)


@given(speeds, st.integers(0, 200), st.integers(0, 40), st.data())
def test_shares_are_complete_and_nobody_goes_without(speeds_s, more, group, data):
    batch, equal = len(speeds_s) + more, -(-(len(speeds_s) + more) // len(speeds_s))
    most = [data.draw(st.integers(equal, batch)) for _ in speeds_s]
    found = balanced(speeds_s, batch, group, most)
    assert sum(found) == batch
    assert min(found) >= 1
    assert all(one <= limit for one, limit in zip(found, most, strict=True))


@given(speeds, st.integers(0, 200))
def test_no_sample_would_be_done_sooner_elsewhere(speeds_s, more):
    batch = len(speeds_s) + more
    found = balanced(speeds_s, batch, 0, [batch] * len(speeds_s))
    longest = max(one * count for one, count in zip(speeds_s, found, strict=True))
    for one, count in zip(speeds_s, found, strict=True):
        others = [each * had for each, had in zip(speeds_s, found, strict=True) if had > 1]
        assert not others or one * (count + 1) >= max(others) * (1 - 1e-9)
    assert longest <= max(speeds_s) * -(-batch // len(speeds_s)) * (1 + 1e-9)


def test_three_times_the_speed_gives_three_times_the_share_in_full_groups_where_it_fits():
    assert balanced([1.0, 3.0], 32, 0, [32, 32]) == [24, 8]
    assert balanced([1.0, 2.9], 64, 8, [64, 64]) == [48, 16]
    assert balanced([1.0, 3.0], 32, 32, [32, 32]) == [24, 8]
    assert balanced([1.0, 3.0], 32, 0, [20, 32]) == [20, 12]
    # 35 groups of 4 and 5: a process that may take 21 gets no group of 5 beside four of 4.
    assert max(balanced([1.0] * 6 + [0.25], 141, 4, [21] * 6 + [23])[:6]) <= 21
