"""Detection of a stalled run and of the rank that the others wait for; one report per stall, none without a stall."""

import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from manyhands.cluster.agents import stall
from manyhands.cluster.agents.heartbeats import HeartbeatMonitor, heartbeat_path
from manyhands.cluster.agents.protocol import WorkersSeen
from manyhands.cluster.agents.stall import StallDetector
from manyhands.parallel.group.heartbeat import HEARTBEAT_FILE, ObservedHeartbeat
from manyhands.train import status
from manyhands.train.status import HeartbeatWriter
from tests.e2e.command import wait_until


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only the test changes, in `now`."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    for module in (stall, status):
        monkeypatch.setattr(module, "time", clock)
    return clock


def seen(rank, **more):
    usual = {"count": 9, "step": 12, "phase": "train", "still_s": 40.0, "usual_s": 0.2, "calls": 50, "moved_bytes": 900,
             "pid": 100 + rank, "quiet_s": 0.0, "cpu_s": 5.0, "stopped": False}  # fmt: skip
    return ObservedHeartbeat(rank=rank, **{**usual, **more})


def reported(clock, *ranks, later=None):
    """What two looks, a second apart, have to say."""
    stalls = StallDetector()
    stalls.add_report(WorkersSeen("n1", list(ranks)))
    clock.now += 1
    stalls.add_report(WorkersSeen("n1", [each.model_copy(update=later) for each in ranks]))
    return stalls


@pytest.mark.parametrize(
    ("ranks", "later", "wanted", "hung"),
    [
        ([seen(0), seen(1, stopped=True, calls=-1)], {}, "waiting for rank 1 on n1 (process 101 is stopped)", True),
        ([seen(0, quiet_s=5), seen(1, stopped=True)], {}, "waiting for rank 1 on n1 (process 101 is stopped)", True),
        ([seen(0), seen(1, quiet_s=40)], {}, "waiting for rank 1 on n1 (process 101 does not respond)", True),
        ([seen(0), seen(1, calls=49)], {}, "waiting for rank 1 on n1 (blocked by a disk", True),
        ([seen(0), seen(1, calls=49, phase="data")], {}, "waiting for rank 1 on n1 (loading data)", True),
        ([seen(0), seen(1, calls=49)], {"cpu_s": 6.0}, "still computing, phase train", False),
        ([seen(0), seen(1)], {"moved_bytes": 1_000_900}, "the network is slow (1 MB/s between the processes)", False),
        ([seen(0), seen(1)], {}, "all processes wait for each other and no data moves", True),
        ([seen(0)], {"cpu_s": 6.0}, "still computing: rank 0 on n1", False),
        ([seen(0, still_s=1), seen(1, still_s=1, stopped=True)], {}, "", True),  # it can't receive a request at once
        ([seen(0, still_s=29)], {}, "", False),
        ([seen(0, usual_s=20.0, still_s=80)], {}, "", False),  # slow as usual
        ([seen(0), seen(1, still_s=30.5)], {}, "step 13 has been stalled for 40 s (usual: 0.2 s)", True),
    ],
)
def test_a_stall_names_who_did_not_come(ranks, later, wanted, hung, clock):
    stalls = reported(clock, *ranks, later=later)
    said = stalls.new_warning()
    assert wanted in said
    assert bool(said) == bool(wanted)
    assert stalls.new_warning() == ""  # it is said once
    assert bool(stalls.why_hung()) == hung


def test_finished_stall_is_forgotten_and_the_next_one_reported(clock):
    stalls = reported(clock, seen(0))
    assert stalls.new_warning()
    clock.now += 10  # its agent has nothing to complain of any more
    assert stalls.new_warning() == stalls.why_hung() == ""
    stalls.add_report(WorkersSeen("n1", [seen(0)]))
    assert stalls.new_warning()


@pytest.mark.parametrize(
    ("rank", "wanted"),
    [
        (seen(1, stopped=True, quiet_s=20, calls=-1), "was stopped for 20 s"),
        (seen(1, quiet_s=20), "did not respond for 20 s"),
        (seen(1, calls=49, still_s=70), "blocked the other ranks for 70 s"),
        # A disk, or a function of the user's, may be slow; all wait for rank 0 then.
        (seen(1, calls=49, still_s=700, phase="save"), ""),
        (seen(1, calls=49, still_s=700, phase="at_epoch_end"), ""),
    ],
)
def test_who_is_ended_has_been_seen_to_hang_for_some_seconds(rank, wanted, clock):
    stalls = StallDetector()
    for seconds in range(6):
        stalls.add_report(WorkersSeen("n1", [seen(0), rank]))
        # At first it may have been a scheduler that had stopped the whole run, and has it go on.
        assert not stalls.find_blocking_rank() or (wanted and seconds > 3)
        clock.now += 1
    find_blocking_rank = stalls.find_blocking_rank()
    assert (find_blocking_rank and find_blocking_rank[0]) == (1 if wanted else None)
    assert wanted in (find_blocking_rank[1] if find_blocking_rank else "")


def test_update_that_took_much_longer_than_usual_is_reported(clock):
    one = HeartbeatWriter()
    said = []
    for step, seconds in enumerate([9.0, 0.1, 0.1, 0.1, 8.0, 0.1, 2.9], 1):
        one.record_progress()
        clock.now += seconds
        said.append(one.record_update(step))
    assert [bool(text) for text in said] == [False] * 4 + [True] + [False] * 2
    assert said[4] == "training stalled for 8 s, waiting for another process (usual: 0.1 s)"
    one.linked = True
    assert "waiting for the network or another process" in one.stall_warning(8.0)


@pytest.fixture
def sleeper():
    """A process that the test may stop."""
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_pulses_of_a_real_process_are_read_and_one_that_is_stopped_is_seen(sleeper, tmp_path, monkeypatch):
    monkeypatch.setattr(status, "HEARTBEAT_S", 0.05)
    monkeypatch.setenv(HEARTBEAT_FILE, str(heartbeat_path(tmp_path, 1)))
    assert HeartbeatMonitor(tmp_path, {1: sleeper.pid}).states(always=True) == []
    sleeper.suspend()
    while sleeper.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    (found,) = HeartbeatMonitor(tmp_path, {1: sleeper.pid}).states(always=False)
    assert (found.rank, found.phase, found.stopped) == (1, "build", True)  # before its first pulse
    one = HeartbeatWriter()
    one.phase = "save"
    with one.write_in_background():
        wait_until(heartbeat_path(tmp_path, 1).is_file)
    pulses = HeartbeatMonitor(tmp_path, {1: sleeper.pid})
    (found,) = pulses.states(always=False)
    assert (found.rank, found.pid, found.phase, found.stopped) == (1, sleeper.pid, "save", True)
    assert pulses.states(always=True) == []  # about once a second
