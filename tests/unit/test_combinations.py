"""Every parallel mode says which sync methods it takes, and only real ones."""

import pytest

from manyhands.core.errors import UserError
from manyhands.core.links import Link
from manyhands.core.plugins import load_choice, module_names
from manyhands.core.world import World
from manyhands.parallel.apply import MODES, resolve_mode
from manyhands.sync.choose import COMBINATIONS, METHODS, resolve_method
from manyhands.sync.costs import Case
from manyhands.sync.options import SyncOptions


def test_the_table_names_all_modes_and_only_real_methods():
    assert set(COMBINATIONS) == set(module_names(MODES))
    assert {method for methods in COMBINATIONS.values() for method in methods} <= set(module_names(METHODS))


@pytest.mark.parametrize("mode", module_names(MODES))
def test_each_combination_is_taken_or_refused_by_name(mode):
    for method in module_names(METHODS):
        if method in COMBINATIONS[mode]:
            assert resolve_method(method, mode) == method
        else:
            with pytest.raises(UserError, match=method):
                resolve_method(method, mode)


def test_words_that_name_nothing_are_refused_with_a_suggestion():
    with pytest.raises(UserError, match="allreduc") as caught:
        resolve_method("allreduc", "data")
    assert 'did you mean "allreduce"?' in caught.value.mend
    with pytest.raises(UserError, match="no parallel mode") as caught:
        resolve_mode("dta", World())
    assert 'did you mean "data"?' in caught.value.mend
    with pytest.raises(UserError, match="single is one process"):
        resolve_mode("single", World(0, 2))


@pytest.mark.parametrize("mode", module_names(MODES))
def test_auto_goes_with_every_mode_and_leaves_no_choice_where_there_is_none(mode):
    assert resolve_method("auto", mode) == ("auto" if len(COMBINATIONS[mode]) > 1 else "allreduce")


def test_a_refusal_names_a_mode_that_takes_the_method():
    with pytest.raises(UserError, match="fsdp can't be combined with local") as caught:
        resolve_method("local", "fsdp")
    assert caught.value.mend == ("--parallel data", "--sync allreduce")


@pytest.mark.parametrize("method", module_names(METHODS))
def test_each_method_says_what_it_does_and_what_it_costs(method):
    choice = load_choice(METHODS, method)
    assert choice.DESCRIPTION
    case = Case(((64, 64), (64,)), 4, 10, 2, 1.0, 0.5, Link(1e6, 1e-4), 1000)
    for cost in choice.estimate(case, SyncOptions()):
        assert cost.method == method
        assert cost.sent_bytes > 0
