"""Whether a run compiles follows from seconds that were measured, and a short run never does."""

from hypothesis import assume, given
from hypothesis import strategies as st

from manyhands.planner.compiling import (
    AT_BEST,
    LEAST_GAIN,
    MANY,
    USUAL_S,
    KindOfCompiler,
    choose_compile,
    could_pay,
)

SECONDS = st.floats(1e-6, 10.0)
KINDS = st.lists(
    st.builds(KindOfCompiler, st.just("one"), SECONDS, SECONDS, st.floats(0.1, 300.0)), min_size=1, max_size=4
)
SAMPLES = st.integers(1, 10**9)


@given(KINDS, SAMPLES)
def test_a_run_that_compiles_is_quicker_for_it_on_every_machine_and_with_many_processes(kinds, samples):
    compiles, said = choose_compile(kinds, samples)
    assert said.startswith(f"train.compile is {str(compiles).lower()}: ")
    for kind in kinds if compiles else ():
        assert kind.plain_s >= LEAST_GAIN * kind.compiled_s
        assert samples / MANY * kind.compiled_s + kind.making_s <= samples / MANY * kind.plain_s * (1 + 1e-9)


@given(KINDS, SAMPLES, st.data())
def test_another_kind_of_machine_or_a_shorter_run_never_makes_it_likelier(kinds, samples, data):
    some = data.draw(st.permutations(kinds))[: data.draw(st.integers(1, len(kinds)))]
    fewer = data.draw(st.integers(1, samples))
    if choose_compile(kinds, fewer)[0]:
        assert choose_compile(some, samples)[0]


@given(KINDS, SAMPLES, st.booleans())
def test_where_one_machine_cannot_or_was_not_looked_at_none_compiles(kinds, samples, refused):
    other = KindOfCompiler("other", 1.0, refused="no compiler" if refused else "")
    compiles, said = choose_compile([*kinds, other], samples)
    assert (compiles, said) == (False, "train.compile is false: no compiler" if refused else "")


@given(SECONDS, SAMPLES)
def test_nothing_is_measured_for_a_run_that_could_not_pay_for_it(seconds, samples):
    if could_pay(seconds, samples):
        assert seconds * samples > MANY * USUAL_S
        assert choose_compile([KindOfCompiler("one", seconds, seconds / AT_BEST, USUAL_S / 2)], samples)[0]


@given(SAMPLES, st.floats(0.0, 1000.0))
def test_a_run_of_half_an_hour_of_one_core_is_never_looked_at(samples, whole_s):
    assume(whole_s < 1800)
    assert not could_pay(whole_s / samples, samples)
