"""The clock of phases: every moment belongs to exactly one of them."""

import subprocess
import sys
import time
from pathlib import Path

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
        clock.to(phase)
        if number in gradients:
            clock.record_gradient()
            clock.backward_ends()
    inner = time.perf_counter() - began
    taken = clock.take()
    outer = time.perf_counter() - before
    assert inner <= sum(taken) <= outer
    assert min(taken) >= 0
    assert sum(end - since for _, since, end in clock.spans) == pytest.approx(sum(taken))
    # Without a hole, and one after the other.
    assert all(one[2] == following[1] for one, following in zip(clock.spans, clock.spans[1:], strict=False))
    clock.to(COMPUTE)
    assert sum(clock.take()) <= time.perf_counter() - before - sum(taken)


def test_what_follows_the_last_gradient_was_waiting():
    clock = PhaseClock()
    clock.to(COMPUTE)
    clock.record_gradient()
    clock.record_gradient()
    time.sleep(0.05)
    clock.backward_ends()
    # Without a gradient since, nothing was waited for.
    time.sleep(0.02)
    clock.backward_ends()
    assert clock.to(SAVING) == COMPUTE
    taken = clock.take()
    assert taken[COMMUNICATION] >= 0.05
    assert taken[COMPUTE] >= 0.02


def test_a_block_gives_the_phase_back_whatever_happens():
    clock = PhaseClock()
    clock.to(COMPUTE)
    with pytest.raises(KeyError), clock.within(EVALUATION), clock.within(SAVING):
        raise KeyError
    assert clock.to(SAVING) == COMPUTE


@pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="the system doesn't count it")
def test_a_process_that_others_keep_from_a_processor_knows_for_how_long():
    code = """if True:
        import os, time
        from manyhands.core.phases import PhaseClock
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        clock = PhaseClock()
        clock.take_queued()
        end = time.monotonic() + 1
        beside = os.fork()
        while time.monotonic() < end:
            pass
        if beside:
            print(clock.take_queued())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.2 < float(done.stdout) < 1.5
