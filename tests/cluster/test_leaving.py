"""How long processes are given to leave, once one of the run has failed."""

import subprocess
import sys
import time

import pytest

from manyhands.cluster.agents import leaving
from manyhands.cluster.agents.leaving import Leaving
from manyhands.core.pulse import rescue_path

WRITES = "import sys, time\nwhile True:\n    open(sys.argv[1], 'wb').write(bytes(100)); time.sleep(0.02)"
SLEEPS = "import time; time.sleep(100)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "saves", "stays"), [(WRITES, True, True), (WRITES, False, False), (SLEEPS, True, False)]
)
def test_who_saves_and_gets_on_with_it_is_waited_for(program, saves, stays, tmp_path, monkeypatch):
    monkeypatch.setattr(leaving, "LEAVE_S", 0.1)
    monkeypatch.setattr(leaving, "QUIET_S", 1.0)
    process = subprocess.Popen([sys.executable, "-c", program, tmp_path / "file"])
    try:
        if saves:
            rescue_path(tmp_path, 3).touch()
        those = Leaving(tmp_path)
        those.begin()
        until = time.monotonic() + 6
        while (patient := those.patient({3: process.pid}, 0.0)) and time.monotonic() < until:
            time.sleep(0.05)
        assert patient == stays
    finally:
        process.kill()
        process.wait()


def test_who_computes_an_update_is_given_the_time_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(leaving, "LEAVE_S", 0.0)
    those = Leaving(tmp_path)
    those.begin()
    assert those.patient({0: 1}, 60.0)
    assert not those.patient({0: 1}, 0.0)


def test_no_save_goes_on_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(leaving, "LEAVE_S", 0.0)
    monkeypatch.setattr(leaving, "MOST_S", 0.0)
    rescue_path(tmp_path, 0).touch()
    those = Leaving(tmp_path)
    those.begin()
    assert not those.patient({0: 1}, 0.0)
