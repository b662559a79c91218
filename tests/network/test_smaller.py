"""A run on three hosts that loses one goes on under each way of sharing the work, and is itself again with three."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import NETS, QUICK, events, final_weights, finish, messages, running, wait_until
from tests.e2e.test_hard_places import assert_alike
from tests.network.runs import (
    EXACT,
    GONE_S,
    LONG,
    begun,
    gone,
    hosts,
    kill_agent,
    machines,
    steps,
    trained_on,
    undisturbed,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
JOB = ["digits", "mlp", "--batch", "60", *QUICK, *EXACT, "--set", "checkpoint.every=20steps"]


def lose_one(lab, here, *options):
    """A run on three hosts, one of which is lost while it trains; what it said."""
    job = [*JOB, "--epochs", "12", *options]
    with running("launch", *job, *hosts(lab), "--out", "run") as process:
        wait_until(begun(kind="saved"), process)
        kill_agent(lab, 2)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        gone(lab)
    (again,), (resumed,) = events("run", "restarted"), events("run", "resumed")
    assert again["step"] == resumed["step"]
    assert len(machines()) == 2
    return err


@pytest.mark.parametrize("mode", [["fsdp"], ["semi"], ["auto"]])
def test_a_new_plan_goes_on_from_the_last_checkpoint(mode, lab, here):
    lose_one(lab, here, "--parallel", *mode)
    assert_alike(final_weights("run"), undisturbed(*JOB, "--epochs", "12"))


@pytest.mark.parametrize("method", [["powersgd", "--set", "sync.rank=2"], ["local", "--set", "sync.every=8"]])
def test_what_a_lost_host_held_back_is_said_and_the_run_goes_on_with_it_again(method, lab, here):
    """Three hosts, two, and three in one run."""
    job = [*LONG, "--set", "checkpoint.every=100steps", "--sync", *method]
    with running("launch", *job, *hosts(lab), "--out", "run") as process:
        wait_until(begun(kind="saved"), process)
        kill_agent(lab, 2)
        wait_until(lambda: events("run", "regrouped"), process)
        trained_on(3, process)
        process.send_signal(signal.SIGINT)
        ended = finish(process)
        assert ended.code == 75, ended.err
        gone(lab)
    assert [event["data"]["processes"] for event in events("run", "started")] == [3, 2, 3]
    said = messages("run", "warning")
    assert sum(words.startswith("resuming without the synchronization state of rank ") for words in said) == 2, said


CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def few_bytes(lab):
    """Puts what a host starts from now on under a limit of memory, which is set later."""
    if not (CGROUP / "memory.limit_in_bytes").exists():
        pytest.skip("NO LIMIT OF MEMORY: there is no cgroup v1 here, or no right to it")
    group = CGROUP / f"manyhands-{os.getpid()}"
    group.mkdir()
    for pid in lab.processes(1):
        (group / "cgroup.procs").write_text(str(pid))
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        (CGROUP / "cgroup.procs").write_text(pid)
    group.rmdir()


def test_one_host_of_three_goes_on_where_a_whole_batch_would_not_fit_into_its_memory(lab, few_bytes, here):
    """Each of three takes 8 samples; the last one has no memory for 24."""
    job = ["synthetic:4800x1x8x8x10", f"{NETS}:Bulky", "--batch", "24", "--epochs", "1", *QUICK, *EXACT]
    limits = ["--set", "train.norm_group=8", "--set", "checkpoint.every=3steps"]
    limits += ["--set", "train.max_steps=10", "--set", "train.evaluate_batch=8"]
    with running("launch", *job, *limits, *hosts(lab), "--out", "run") as process:
        wait_until(begun(kind="saved"), process)
        used = int((few_bytes / "memory.max_usage_in_bytes").read_text())
        (few_bytes / "memory.limit_in_bytes").write_text(str(used + (100 << 20)))
        for host in (2, 3):
            kill_agent(lab, host)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert "computes an update in 3 micro-batches of at most 8 samples, the limit from the start of the run" in err
    # The others may be back before the end.
    assert 1 in [event["data"]["processes"] for event in events("run", "started")]
    assert_alike(final_weights("run"), undisturbed(*job, *limits))


def test_a_host_that_stood_still_and_wakes_writes_nothing_and_ends(lab, here):
    """All hosts of the lab share a disk, so that its processes could write where the run goes on without them."""
    job = [*JOB, "--epochs", "40"]
    with running("launch", *job, *hosts(lab), "--out", "run") as process:
        wait_until(begun(kind="saved"), process)
        ours = [pid for pid in lab.processes(1) if b"agents.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for pid in ours:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: events("run", "resumed"), process)
        for pid in ours:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not any(map(psutil.pid_exists, ours)), patience=2 * GONE_S)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert "WARNING n1 is lost: no message for" in err
    assert not list(here.glob("run/ranks/failures/*.json"))
    assert steps() == sorted(set(steps()))
    # The host is taken up again, perhaps after the last update, which is saved before and after that.
    saved = [event["step"] for event in events("run", "saved")]
    assert saved[:-1] == sorted(set(saved[:-1]))
    assert saved[-1] >= saved[-2]
    assert_alike(final_weights("run"), undisturbed(*job))
