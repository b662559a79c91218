"""Times of ops, measured once, kept, and estimated where the budget is used up."""

import json
import time

import pytest
import torch

from manyhands.planner import timing
from manyhands.planner.timing import MOST_DAYS, OpTimes, OtherLoad, time_function


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """Whatever else this machine does, and however little of it this process may use."""
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    monkeypatch.setattr(timing, "cores", lambda: 1024.0)


class Op:
    made = 0

    def make(self):
        self.made += 1
        weight = torch.ones(32, 32, requires_grad=True)
        return lambda: (weight @ weight).sum().backward()


def test_what_was_measured_is_kept_for_the_next(tmp_path):
    op, first = Op(), OpTimes(folder=tmp_path)
    seconds = first.seconds("product 32", op.make, 1, 1)
    assert seconds > 0
    assert first.seconds("product 32", op.make, 1, 1) == seconds
    first.save()
    second = OpTimes(folder=tmp_path, budget_s=0)
    assert second.seconds("product 32", op.make, 1, 1) == seconds
    assert (op.made, second.measured, second.estimated, second.notes) == (1, 0, 0, [])


def test_without_a_budget_nothing_is_run_and_estimates_grow_with_the_work_and_one_used_up_ends_measuring(tmp_path):
    op, times = Op(), OpTimes(folder=tmp_path, budget_s=0)
    small, large = (times.seconds(f"product {work}", op.make, work * 1e9, 0) for work in (1, 3))
    assert large == pytest.approx(3 * small)
    assert times.seconds("moves", op.make, 0, 1e9) == times.estimate(1, 1e9) > 0
    assert (op.made, times.estimated) == (0, 3)
    times.save()
    assert not times.file.exists()
    times = OpTimes(folder=tmp_path, budget_s=1e-9)
    times.seconds("first", op.make, 1, 1)
    times.seconds("second", op.make, 1e9, 1)
    times.save()
    assert (op.made, times.measured, times.estimated) == (1, 1, 1)
    # Rates are this device's.
    assert sorted(json.loads(times.file.read_text())["times"]) == ["first", "rate of a copy", "rate of a product"]


def test_two_that_write_at_the_same_time_both_count(tmp_path):
    op = Op()
    one, other = OpTimes(folder=tmp_path), OpTimes(folder=tmp_path)
    one.seconds("a", op.make, 1, 1)
    other.seconds("b", op.make, 1, 1)
    one.save()
    other.save()
    assert sorted(json.loads(one.file.read_text())["times"]) == ["a", "b"]
    assert [file.name for file in tmp_path.iterdir()] == [one.file.name]


@pytest.mark.parametrize("broken", ["", "[]", '{"format": "op-times/0"}', "\0"])
def test_a_broken_file_is_noted_and_begun_anew(tmp_path, broken):
    file = OpTimes(folder=tmp_path).file
    file.write_text(broken)
    times = OpTimes(folder=tmp_path)
    assert str(file) in times.notes[0]
    times.seconds("a", Op().make, 1, 1)
    times.save()
    assert OpTimes(folder=tmp_path).notes == []


def _kept(folder, **changed):
    op, times = Op(), OpTimes(folder=folder)
    times.seconds("a", op.make, 1, 1)
    times.save()
    content = json.loads(times.file.read_text())
    content["times"]["a"] |= {"seconds": 7.0, "spread": 0.25, "busy": 0.0, "at": time.time(), **changed}
    times.file.write_text(json.dumps(content))


def test_old_times_and_what_is_none_are_measured_anew(tmp_path):
    op = Op()
    for value in ("fast", -1, True, float("nan")):
        _kept(tmp_path, seconds=value)
        assert '"a" has no time' in OpTimes(folder=tmp_path).notes[0]
    _kept(tmp_path)
    assert OpTimes(folder=tmp_path).seconds("a", op.make, 1, 1) == 7.0
    _kept(tmp_path, at=time.time() - (MOST_DAYS + 1) * 86400)
    assert OpTimes(folder=tmp_path).seconds("a", op.make, 1, 1) < 7.0


@pytest.mark.parametrize(("now", "seconds"), [(0.9, 7.0), (0.0, None)])
def test_what_a_busy_moment_gave_is_kept_no_longer_than_the_machine_is_busy(tmp_path, monkeypatch, now, seconds):
    op = Op()
    _kept(tmp_path, busy=0.6)
    monkeypatch.setattr(OtherLoad, "share", lambda self: now)
    times = OpTimes(folder=tmp_path)
    found = times.seconds("a", op.make, 1, 1)
    assert found == seconds if seconds else found < 7.0
    assert bool(times.busy_warnings()) == bool(now)
    assert (times.spread == 0.25) == bool(now)
    # Nothing can be measured without a budget, so a doubtful time is better than none.
    assert OpTimes(folder=tmp_path, budget_s=0.0).seconds("a", op.make, 1, 1) == 7.0


def test_costs_are_those_of_the_quickest_repeat_with_their_spread(tmp_path):
    pauses = iter([0.0, 0.03, 0.001, 0.03, 0.03, *[0.03] * 20])  # the first isn't counted
    times = OpTimes(folder=tmp_path)
    found = times.seconds("a", lambda: lambda: time.sleep(next(pauses)), 1, 1)
    assert 0.001 <= found < 0.03
    assert times.spread > 1


@pytest.mark.parametrize("busy", [False, True])
def test_on_a_busy_machine_processor_time_counts_on_one_thread(busy):
    seen, before = [], torch.get_num_threads()

    def run():
        seen.append(torch.get_num_threads())
        time.sleep(0.01)

    found = time_function(run, "cpu", most=3, budget_s=1.0, busy=busy)
    assert (found.seconds < 0.01) == busy
    assert set(seen) == {1 if busy else before}
    assert torch.get_num_threads() == before
