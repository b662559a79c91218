"""Saves: how often they come, and that what is written beside training is of the moment when it was asked for."""

import functools
import json
import math
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manyhands.checkpoint.write import SaveError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.parallel.network import ParallelNetwork
from manyhands.train.saver import (
    EXPECTED_S,
    LONGEST_S,
    SHARE,
    SHORTEST_S,
    USUAL_S,
    SaveInterval,
    SaveOutcome,
    Saver,
    best_save_interval,
    count_earlier_failures,
    estimate_seconds_between_failures,
)  # fmt: skip
from manyhands.train.state import Progress, capture, copy_to_cpu


@given(st.floats(0, 1e5), st.floats(0.1, 1e8))
def test_within_its_bounds_no_other_interval_costs_less(save_s, fails_s):
    def cost(seconds):  # a second's share of saves, and of what half an interval loses at each failure
        return save_s / seconds + seconds / 2 / fails_s

    best, longest_s = best_save_interval(save_s, fails_s), min(LONGEST_S, max(USUAL_S, save_s / SHARE))
    assert SHORTEST_S <= best <= longest_s
    for other in (SHORTEST_S, best / 1.1, best * 1.1, longest_s):
        if SHORTEST_S <= other <= longest_s:
            assert cost(best) <= cost(other) * (1 + 1e-9)


@given(st.integers(0, 1000), st.floats(0, 1e8), st.integers(1, 1000))
def test_what_was_seen_counts_and_no_quiet_time_makes_a_run_careless(failures, trained_s, machines):
    found = estimate_seconds_between_failures(failures, trained_s, machines)
    assert 0 < found <= EXPECTED_S / machines
    assert estimate_seconds_between_failures(0, trained_s, machines) == pytest.approx(EXPECTED_S / machines)
    assert estimate_seconds_between_failures(failures + 1, trained_s, machines) <= found
    assert estimate_seconds_between_failures(10**6, 1e9, 1) == pytest.approx(1e9 / 10**6, rel=1e-4)


def _diary(tmp_path, *kinds):
    """One event each 10 seconds."""
    folder = RunFolder(tmp_path)
    lines = [json.dumps({"kind": kind, "time": 1000.0 + 10 * number}) for number, kind in enumerate(kinds)]
    folder.events.write_text("\n".join(lines) + "\n" if lines else "")
    return folder


@pytest.mark.parametrize(
    ("kinds", "failures", "trained_s"),
    [
        ((), 0, 0),
        (("started", "first-step", "saved", "stopped"), 0, 20),
        (("started", "failed"), 0, 0),
        (("started", "first-step", "saved", "restarted", "started", "resumed", "saved", "restarted"), 2, 40),
        (("started", "first-step", "saved", "restarted", "failed"), 1, 20),
        (("started", "first-step", "saved", "regrouped", "started", "resumed", "finished"), 0, 30),
        (("started", "first-step", "saved"), 1, 10),
        (("started", "first-step", "saved", "started", "resumed", "stopped"), 1, 30),
    ],
)
def test_failures_are_read_from_the_runs_diary(tmp_path, kinds, failures, trained_s):
    assert count_earlier_failures(_diary(tmp_path, *kinds)) == (failures, trained_s)


def test_a_save_costs_what_training_waits_for_and_on_a_cpu_what_it_writes_beside_it(tmp_path):
    failed = _diary(tmp_path, "first-step", "restarted", "resumed", "restarted")
    expected = estimate_seconds_between_failures(2, 20, 1)
    for device, cost_s in (("cpu", 0.7), ("cuda:0", 0.5)):
        found = SaveInterval(failed, World(device=device)).record_save(0.5, 0.2)
        assert found == pytest.approx(math.sqrt(2 * cost_s * expected), rel=1e-2)
    alone, apart, failing = (
        SaveInterval(_diary(tmp_path, *kinds), World(size=4, local_size=local_size)).record_save(18.0, 0)
        for kinds, local_size in (((), 4), ((), 1), (("started", "first-step", "restarted"), 4))
    )
    assert failing < apart == pytest.approx(alone / 2)  # each machine may fail
    assert SaveInterval(_diary(tmp_path), World()).record_save(0.3, 0) == USUAL_S


PATIENCE_S = 60


def test_training_continues_during_a_write_and_gets_its_result():
    saver, may, snapshot = Saver(), threading.Event(), nn.Linear(1, 1)
    weakref.finalize(snapshot, time.sleep, 0.2)

    def write(_):
        assert may.wait(PATIENCE_S)
        return SaveOutcome(digests={"model": "7"})

    saver.start_save(7, functools.partial(write, snapshot))
    del snapshot
    assert (saver.step, saver.done) == (7, False)
    may.set()
    assert saver.end_save() == SaveOutcome(digests={"model": "7"})
    assert "saving" not in [one.name for one in threading.enumerate()]  # it has freed the snapshot too
    saver.start_save(8, None)  # a process that writes nothing
    assert (saver.step, saver.done) == (8, False)
    assert saver.end_save() is None


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_is_an_outcome_and_anything_else_is_raised(background):
    saver = Saver()
    for step, error in enumerate((SaveError("the disk is full"), TypeError("not plain data"))):
        saver.start_save(step, mock.Mock(side_effect=error), background=background)
        saver.wait()
        assert saver.done
        if step:
            with pytest.raises(TypeError, match="not plain data"):
                saver.end_save()
        else:
            assert saver.end_save() == SaveOutcome("the disk is full")
        assert saver.step is None


def test_what_training_changes_afterwards_is_not_in_the_copy():
    network = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=3)

    def loss():
        value = (network(torch.ones(4, 2)) - 3).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    reported = {"rates": [1, 2]}
    before = capture(ParallelNetwork(network), optimizer, Progress(step=1), reported)
    texts = str(before)
    optimizer.step(loss)
    optimizer.param_groups[0]["lr"] = 0.5
    reported["rates"].append(3)
    assert str(before) == texts
    assert str(capture(ParallelNetwork(network), optimizer, Progress(step=1), reported)) != texts


def test_who_keeps_a_copy_has_each_tensor_and_who_does_not_has_none():
    """As FSDP gives it: weights, and beside them the very count that Adam keeps on the CPU."""
    count, weights = torch.tensor(3.0), torch.ones(2)
    given = ({"weight": weights}, {"state": {"weight": {"step": count}}})
    found = copy_to_cpu(given)
    for live in (count, weights):
        live += 1
    assert found[1]["state"]["weight"]["step"] == 3
    assert found[0]["weight"].tolist() == [1, 1]
    assert copy_to_cpu(given, keep=False) == ({"weight": None}, {"state": {"weight": {"step": None}}})
