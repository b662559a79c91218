"""Machines that a run of three hosts loses, that rejoin or are added: the updates are those of an undisturbed run."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from manyhands.config.load import load_job
from tests.e2e.command import NETS, QUICK, assert_one_screen, events, final_weights, finish, messages, wait_until
from tests.e2e.test_hard_places import assert_alike
from tests.network.lab import SOURCE
from tests.network.runs import (
    EXACT,
    GONE_S,
    LONG,
    agents,
    assert_same_updates,
    begun,
    gone,
    hosts,
    kill_agent,
    machines,
    run,
    running,
    steps,
    strike,
    trained_on,
    trains_on,
    undisturbed,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
# Processes that are cut off end within ALONE_S (26 s), after a save; 3 s are for a busy machine.
CUT_OFF_S = 29


def ended_as_undisturbed(process, folder="run"):
    """Stops the run, and compares it with one that nothing has happened to, up to the same update."""
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 75, ended.err
    last = events("run", "stopped")[-1]["step"]
    assert_same_updates(folder, undisturbed(*LONG, "--set", f"train.max_steps={last}"))
    # Each update that counts was made once: a record's step is beyond the one before it.
    made = steps()
    assert made == sorted(set(made)), made
    return ended


@pytest.mark.parametrize("how", ["agent", "kill", "down"])
def test_a_machine_that_comes_back_takes_part_again(how, lab, here):
    with running("launch", *LONG, "--set", "checkpoint.every=100steps", *hosts(lab), "--out", "run") as process:
        wait_until(begun(kind="saved"), process)
        strike(lab, 3, how)
        if how != "agent":
            wait_until(lambda: len(machines()) == 2, process)
            lab.up(3)
        if how == "kill":
            lab.start(3)
        back = time.time()
        wait_until(lambda: events("run", "regrouped"), process)
        trained_on(3, process)
        print(f"{how}: {[(e['kind'], round(e['time'] - back, 1)) for e in events('run') if e['time'] > back]}")
        ended_as_undisturbed(process)
        gone(lab)
    assert machines() == ["n1", "n2", "n3"]


def of_connection(lab, host, end, launcher):
    """The processes of ssh to a host: the launcher's, or those of its server, but for the one that listens."""
    if end == "client":
        return [child.pid for child in psutil.Process(launcher).children() if lab.name(host) in child.cmdline()]
    found = [psutil.Process(pid) for pid in lab.processes(host)]
    return [one.pid for one in found if one.name().startswith("sshd") and "-D" not in one.cmdline()]


@pytest.mark.parametrize(("count", "host", "end"), [(3, 1, "server"), (3, 2, "client"), (2, 2, "server")])
def test_the_end_of_a_connection_is_not_the_end_of_a_machine(count, host, end, lab, here):
    """All commands agree that the run is active, and then that it has stopped."""
    with running("launch", *LONG, *hosts(lab)[2:], "--hosts", ",".join(lab.names[:count]), "--out", "run") as process:
        wait_until(begun(), process)
        ended = of_connection(lab, host, end, process.pid)
        assert ended
        for pid in ended:
            os.kill(pid, signal.SIGKILL)
        time.sleep(CUT_OFF_S)  # who was cut off has gone by then
        trains_on(steps, process)
        assert "run" in run("ps").out.split()
        assert "is active" in run("why", "run").out
        told = ended_as_undisturbed(process).err
        gone(lab)
    assert run("ps").out == "no run is active\n"
    assert "run stopped" in run("why", "run").out
    assert "the run is not active" in run("stop", "run").err
    assert not events("run", "restarted")
    assert f"lost the connection to n{host}; reconnecting" in told
    assert f"reconnected to n{host}" in told
    again = run("resume", "run", "--set", f"train.max_steps={steps()[-1] + 20}")
    assert again.code == 0, again.err


def test_first_machine_is_disconnected_rejoins_and_finally_continues_alone(lab, here):
    """Each has a disk of its own. What n1 wrote while it was cut off is not the run's, nor among its records later."""
    place = Path("/srv/manyhands-rejoin")
    place.mkdir(parents=True, exist_ok=True)
    for host in lab.hosts:
        lab.start(host, prepare=f"mount -t tmpfs none {place}")
    with running("launch", *LONG, *hosts(lab), "--cluster.workdir", place, "--out", "run") as process:
        wait_until(begun(), process)
        lab.down(1)
        cut = time.monotonic()
        wait_until(lambda: not agents(lab, [1]), process)
        assert time.monotonic() < cut + CUT_OFF_S
        time.sleep(max(0, cut + 25 - time.monotonic()))
        lab.up(1)
        back = time.time()
        trained_on(3, process)
        print(f"cut: {[(e['kind'], round(e['time'] - back, 1)) for e in events('run') if e['time'] > back]}")
        assert machines()[0] != "n1"
        for host in (2, 3):
            lab.kill(host)
        wait_until(lambda: machines() == ["n1"], process)
        trains_on(steps, process)
        ended_as_undisturbed(process, f"/proc/{lab._servers[1].pid}/root/{place}/run")
    gone(lab)
    place.rmdir()


def test_machine_joins_an_active_run(lab, here):
    """The head is on n2, whose sshd the third machine reaches, as it is reached from there."""
    command = [lab.python, "-m", "manyhands", "launch", *LONG, *hosts(lab)[2:], "--hosts", "n1,n2", "--out", "run"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
        head = lab.exec(2, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        wait_until(begun(), head)
        assert (here / "run" / "head.sock").stat().st_mode & 0o777 == 0o600
        said = lab.run(2, [lab.python, "-m", "manyhands", "join", "run", "--host", "n3"])
    assert said == "n3 has joined run\n"
    trained_on(3, head)
    assert machines()[2] == "n3"
    ended_as_undisturbed(head)
    assert load_job({}, file=Path("run/job.toml")).job.cluster.hosts == ("n1", "n2", "n3")  # as `resume` reads it
    gone(lab)
    assert not (here / "run" / "head.sock").exists()


def test_refused_machine_gets_the_reason_and_the_run_continues(lab, here):
    job = ["launch", *LONG, "--hosts", "n1,n2", "--cluster.ssh", lab.ssh, "--elastic", "1:3", "--out", "run"]
    lab.down(3)
    with running(*job) as process:
        wait_until(begun(), process)
        for host, told in [("n2", "n2 is already part of the run"), ("n1,n2", "join adds one machine at a time"),
                           ("nowhere", "nowhere can't be resolved to an address")]:  # fmt: skip
            refused = run("join", "run", "--host", host)
            assert refused.code == 1, refused.err
            assert told in refused.err
            assert_one_screen(refused.err)
        before = len(steps())
        wait_until(lambda: len(steps()) > before, process)
        assert not events("run", "regrouped")
        process.send_signal(signal.SIGINT)
        assert finish(process).code == 75
    ended = run("join", "run", "--host", "n3")
    assert ended.code == 2
    assert "the run is not active" in ended.err


JOB = ["digits", "mlp", "--batch", "60", *QUICK, *EXACT, "--set", "checkpoint.every=20steps"]


def lose_one(lab, here, *options):
    """A run on three hosts, one of which is lost while it trains; what it said."""
    job = [*JOB, "--epochs", "12", *options]
    with running("launch", *job, *hosts(lab), "--out", "run") as process:
        wait_until(begun(kind="saved"), process)
        lab.end_sshd(2)
        kill_agent(lab, 2)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        gone(lab)
    (again,), (resumed,) = events("run", "restarted"), events("run", "resumed")
    assert again["step"] == resumed["step"]
    assert len(machines()) == 2
    return err


# Started, each host's processes have a seed of hashes of their own, as the processes of users have.
@pytest.mark.parametrize(("mode", "forks"), [(["fsdp"], True), (["semi"], True), (["auto"], False)])
def test_new_plan_resumes_from_the_last_checkpoint(mode, lab, here):
    lose_one(lab, here, "--parallel", *mode)
    assert_alike(final_weights("run"), undisturbed(*JOB, "--epochs", "12"))


@pytest.mark.parametrize("method", [["powersgd", "--set", "sync.rank=2"], ["local", "--set", "sync.every=8"]])
def test_lost_sync_state_is_reported_and_the_lost_host_rejoins(method, lab, here):
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
    """Puts what a host starts from now on, without forks, under a limit of memory, which is set later."""
    if not (CGROUP / "memory.limit_in_bytes").exists():
        pytest.skip("NO LIMIT OF MEMORY: there is no cgroup v1 here, or no right to it")
    group = CGROUP / f"manyhands-{os.getpid()}"
    group.mkdir()
    lab.start(1, environment={"PYTHONPATH": str(SOURCE)})
    for pid in lab.processes(1):
        (group / "cgroup.procs").write_text(str(pid))
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        (CGROUP / "cgroup.procs").write_text(pid)
    group.rmdir()


def test_one_host_of_three_continues_if_a_batch_in_one_pass_exceeds_its_memory(lab, few_bytes, here):
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
    # The host is taken up again; where that is before an evaluation, the same update is saved once more after it.
    saved = [event["step"] for event in events("run", "saved")]
    assert saved == sorted(saved)
    assert len(saved) - len(set(saved)) <= 1
    assert_alike(final_weights("run"), undisturbed(*job))
