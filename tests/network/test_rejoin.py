"""Machines that a run of three hosts loses, that rejoin or are added: the updates are those of an undisturbed run."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from manyhands.config.load import load_job
from tests.e2e import command
from tests.e2e.command import QUICKLY, done, events, final_weights, finish, messages, read, stop, training, wait_until
from tests.e2e.test_hard_places import assert_alike
from tests.network import runs

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
# Processes that are cut off end within ALONE_S (26 s), after a save; 3 s are for a busy machine.
CUT_OFF_S = 29


@pytest.mark.parametrize("how", ["agent", "kill", "down"])
def test_a_machine_that_comes_back_takes_part_again(how, lab, here):
    with training("launch", runs.LONG, "--set checkpoint.every=100steps", runs.hosts(lab), "--out run") as process:
        wait_until(runs.begun(kind="saved"), process)
        runs.strike(lab, 3, how)
        if how != "agent":
            wait_until(lambda: len(runs.machines()) == 2, process)
            lab.up(3)
        if how == "kill":
            lab.start(3)
        back = time.time()
        wait_until(lambda: events("run", "regrouped"), process)
        runs.trained_on(3, process)
        print(f"{how}: {[(e['kind'], round(e['time'] - back, 1)) for e in events('run') if e['time'] > back]}")
        runs.stopped_as_undisturbed(process)
        runs.gone(lab)
    assert runs.machines() == ["n1", "n2", "n3"]


def of_connection(lab, host, end, launcher):
    """The processes of ssh to a host: the launcher's, or those of its server, but for the one that listens."""
    if end == "client":
        return [child.pid for child in psutil.Process(launcher).children() if lab.name(host) in child.cmdline()]
    found = [psutil.Process(pid) for pid in lab.processes(host)]
    return [one.pid for one in found if one.name().startswith("sshd") and "-D" not in one.cmdline()]


@pytest.mark.parametrize(("count", "host", "end"), [(3, 1, "server"), (3, 2, "client"), (2, 2, "server")])
def test_the_end_of_a_connection_is_not_the_end_of_a_machine(count, host, end, lab, here):
    """All commands agree that the run is active, and then that it has stopped."""
    names = ",".join(lab.names[:count])
    with training("launch", runs.LONG, runs.hosts(lab)[2:], "--hosts", names, "--out run") as process:
        wait_until(runs.begun(), process)
        ended = of_connection(lab, host, end, process.pid)
        assert ended
        for pid in ended:
            os.kill(pid, signal.SIGKILL)
        time.sleep(CUT_OFF_S)  # who was cut off has gone by then
        runs.trains_on(runs.steps, process)
        assert "run" in done("ps").out.split()
        assert "is active" in done("why run").out
        reported = runs.stopped_as_undisturbed(process).err
        runs.gone(lab)
    assert done("ps").out == "no run is active\n"
    assert "run stopped" in done("why run").out
    done("stop run", code=2, says="the run is not active")
    assert not events("run", "restarted")
    assert f"lost the connection to n{host}; reconnecting" in reported
    assert f"reconnected to n{host}" in reported
    done(f"resume run --set train.max_steps={runs.steps()[-1] + 20}")


def test_first_machine_is_disconnected_rejoins_and_finally_continues_alone(apart):
    """Each has a disk of its own. What n1 wrote while it was cut off is not the run's, nor among its records later."""
    with training("launch", runs.LONG, runs.hosts(apart, where=runs.PLACE), "--out run") as process:
        wait_until(runs.begun(), process)
        apart.down(1)
        cut = time.monotonic()
        wait_until(lambda: not runs.agents(apart, [1]), process)
        assert time.monotonic() < cut + CUT_OFF_S
        time.sleep(max(0, cut + 25 - time.monotonic()))
        apart.up(1)
        back = time.time()
        runs.trained_on(3, process)
        print(f"cut: {[(e['kind'], round(e['time'] - back, 1)) for e in events('run') if e['time'] > back]}")
        assert runs.machines()[0] != "n1"
        for host in (2, 3):
            apart.kill(host)
        wait_until(lambda: runs.machines() == ["n1"], process)
        runs.trains_on(runs.steps, process)
        runs.stopped_as_undisturbed(process, f"/proc/{apart._servers[1].pid}/root/{runs.PLACE}/run")
    runs.gone(apart)


def test_machine_joins_an_active_run(lab, here):
    """The head is on n2, whose sshd the third machine reaches, as it is reached from there."""
    (here / "mine.py").touch()
    head = runs.typed_on(lab, 2, "launch", runs.LONG, runs.hosts(lab)[2:], "--hosts n1,n2 --out run --sync-code")
    wait_until(runs.begun(), head)
    assert (here / "run" / "head.sock").stat().st_mode & 0o777 == 0o600
    assert finish(runs.typed_on(lab, 2, "join run --host n3"), code=0).out == "n3 has joined run\n"
    runs.trained_on(3, head)
    assert runs.machines()[2] == "n3"
    # Its agent has changed to the folder of the code by then.
    assert {one["folder"] for one in read("run", "machines.json")} == {str(here / "run")}
    runs.stopped_as_undisturbed(head)
    assert load_job({}, file=Path("run/job.toml")).job.cluster.hosts == ("n1", "n2", "n3")  # as `resume` reads it
    runs.gone(lab)
    assert not (here / "run" / "head.sock").exists()
    done("join run --host n3", code=2, says="the run is not active")


JOB = f"digits mlp --batch 60 {QUICKLY} {runs.EXACT} --set checkpoint.every=20steps"


@pytest.mark.parametrize("method", ["powersgd --set sync.rank=2", "local --set sync.every=8"])
def test_lost_sync_state_is_reported_and_the_lost_host_rejoins(method, lab, here):
    """Three hosts, two, and three in one run."""
    with training(
        "launch", runs.LONG, "--set checkpoint.every=100steps --out run --sync", method, runs.hosts(lab)
    ) as process:
        wait_until(runs.begun(kind="saved"), process)
        runs.kill_agent(lab, 2)
        wait_until(lambda: events("run", "regrouped"), process)
        runs.trained_on(3, process)
        stop(process, signal.SIGINT)
        runs.gone(lab)
    assert [event["data"]["processes"] for event in events("run", "started")] == [3, 2, 3]
    said = messages("run", "warning")
    assert sum(words.startswith("resuming without the synchronization state of rank ") for words in said) == 2, said


def test_a_host_that_stood_still_and_wakes_writes_nothing_and_ends(lab, here):
    """All hosts of the lab share a disk, so that its processes could write where the run goes on without them."""
    with training("launch", JOB, "--epochs 40 --out run", runs.hosts(lab)) as process:
        wait_until(runs.begun(kind="saved"), process)
        ours = [one for one in map(psutil.Process, lab.processes(1)) if "agents.agent" in " ".join(one.cmdline())]
        for one in ours:
            one.suspend()
        wait_until(lambda: events("run", "resumed"), process)
        for one in ours:
            one.resume()
        wait_until(lambda: all(map(command.has_ended, ours)), patience=2 * runs.GONE_S)
        finish(process, code=0, says="WARNING n1 is lost: no message for")
    assert not list(here.glob("run/ranks/failures/*.json"))
    assert runs.steps() == sorted(set(runs.steps()))
    # The host is taken up again; where that is before an evaluation, the same update is saved once more after it.
    saved = [event["step"] for event in events("run", "saved")]
    assert saved == sorted(saved)
    assert len(saved) - len(set(saved)) <= 1
    assert_alike(final_weights("run"), runs.undisturbed(JOB, "--epochs 40"))
