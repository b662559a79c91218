"""Which parallel mode takes which sync method follows from what the one offers and the other needs."""

import pytest

from manyhands.config.load import load_job
from manyhands.core.choices import load_choice, module_names
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.parallel.apply import resolve_mode
from manyhands.parallel.options import MODES
from manyhands.sync.choose import EXACT, check_method
from manyhands.sync.costs import LinkCase
from manyhands.sync.link_speeds import LinkSpeed
from manyhands.sync.options import METHODS, SyncOptions
from manyhands.train import choose_sync
from manyhands.train.choose_sync import check_combination, leaves_a_choice

# The others average gradients by themselves.
TAKE_ALL = {"single", "data"}


@pytest.mark.parametrize("mode", module_names(MODES))
def test_each_combination_is_taken_or_refused_by_name(mode):
    check_combination("auto", mode)
    assert leaves_a_choice(mode) == (mode in TAKE_ALL)
    for method in module_names(METHODS):
        if mode in TAKE_ALL or method == EXACT:
            check_combination(method, mode)
        else:
            with pytest.raises(UserError, match=f"{mode} can't be combined with --sync {method}, which averages|needs"):
                check_combination(method, mode)


def test_words_that_name_nothing_are_refused_with_a_suggestion():
    with pytest.raises(UserError, match="allreduc") as caught:
        check_method("allreduc")
    assert 'did you mean "allreduce"?' in caught.value.hints
    with pytest.raises(UserError, match="no parallel mode") as caught:
        resolve_mode("dta", World())
    assert 'did you mean "data"?' in caught.value.hints
    with pytest.raises(UserError, match="single runs as one process"):
        resolve_mode("single", World(0, 2))


def test_a_refusal_names_a_mode_that_takes_the_method():
    with pytest.raises(UserError, match="fsdp can't be combined with --sync local") as caught:
        check_combination("local", "fsdp")
    assert caught.value.hints == ("set --parallel data", "or set --sync allreduce")


@pytest.mark.parametrize("method", module_names(METHODS))
def test_each_method_says_what_it_does_and_what_it_costs(method):
    choice = load_choice(METHODS, method)
    assert choice.DESCRIPTION
    assert bool(getattr(choice, "EXCEPTION", "")) != choice.EXACT
    case = LinkCase(((64, 64), (64,)), 4, 10, 2, 1.0, 0.5, LinkSpeed(1e6, 1e-4), 1000)
    for cost in choice.estimate(case, SyncOptions()):
        assert cost.method == method
        assert cost.sent_bytes > 0


@pytest.mark.parametrize("method", ["auto", "local"])
def test_delays_longer_than_the_pace_are_refused_before_anything_is_timed(method):
    job = load_job({"sync.method": method, "sync.every": 5, "sync.delay": 20}, environment={}).job
    with pytest.raises(UserError, match="the delay of 20 steps exceeds"):
        choose_sync._requested(job, "data")
