"""The clock of phases: every moment belongs to exactly one of them."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.phases import COMMUNICATION, COMPUTE, EVALUATION, PHASES, SAVING, PhaseClock


@given(st.lists(st.integers(0, len(PHASES) - 1), max_size=30), st.sets(st.integers(0, 30)))
def test_phases_add_up_to_the_time(path, gradients):
    before = time.perf_counter()
    clock = PhaseClock()
    began = time.perf_counter()
    clock.spans = []
    for number, phase in enumerate(path):
        clock.start_phase(phase)
        if number in gradients:
            clock.record_gradient()
            clock.end_backward()
    inner = time.perf_counter() - began
    taken = clock.take_seconds()
    outer = time.perf_counter() - before
    assert inner <= sum(taken) <= outer
    assert min(taken) >= 0
    assert sum(end - since for _, since, end in clock.spans) == pytest.approx(sum(taken))
    # Without a hole, and one after the other.
    assert all(one[2] == following[1] for one, following in zip(clock.spans, clock.spans[1:], strict=False))
    clock.start_phase(COMPUTE)
    assert sum(clock.take_seconds()) <= time.perf_counter() - before - sum(taken)


def test_what_follows_the_last_gradient_was_waiting_and_a_block_gives_the_phase_back():
    clock = PhaseClock()
    clock.start_phase(COMPUTE)
    clock.record_gradient()
    time.sleep(0.03)
    clock.end_backward()
    # Without a gradient since, nothing was waited for.
    time.sleep(0.02)
    clock.end_backward()
    with pytest.raises(KeyError), clock.in_phase(EVALUATION), clock.in_phase(SAVING):
        raise KeyError
    assert clock.start_phase(SAVING) == COMPUTE
    taken = clock.take_seconds()
    assert taken[COMMUNICATION] >= 0.03
    assert taken[COMPUTE] >= 0.02
