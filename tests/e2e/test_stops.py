"""Stops of every kind: what is saved and left behind, where a run goes on; and runs that outlive their launcher."""

import contextlib
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e import command
from tests.e2e.command import NETS, QUICKLY, done, events, finish, inside, marked, start, stop, training, wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("ends")]
# Longer than any test waits.
LONG = f"--epochs 100000 --batch 64 {QUICKLY} --out run"
ENDLESS = f"train synthetic:4000x1x8x8x10 {NETS}:Net {LONG}"
SAVING = "--set checkpoint.every=20steps --set train.evaluate_every=1000"


@pytest.fixture
def ends(here):
    """Ends what a test leaves."""
    yield
    for process in marked(str(here)):
        with contextlib.suppress(psutil.Error):
            process.kill()


def begun(folder="run"):
    return lambda: events(folder, "first-step")


def last(kind, folder="run"):
    """The step of the run's last event of a kind."""
    return events(folder, kind)[-1]["step"]


def outer_interface():
    """One that other machines could reach; gloo would look in vain for a name that is none."""
    return next((name for name in psutil.net_if_addrs() if name.startswith(("eth", "en"))), "eth7")


def test_stop_saves_and_is_reported(here):
    # As clusters' shells do, for what is between machines.
    names = {"GLOO_SOCKET_IFNAME": outer_interface(), "NCCL_SOCKET_IFNAME": outer_interface()}
    with training(ENDLESS, "-n 2", **names) as process:
        wait_until(begun(), process)
        sockets = [each for member in marked(str(here)) for each in member.net_connections("inet")]
        stop(process, signal.SIGUSR1, says="stopped and saved at step")
    (event,) = events("run", "stopped")
    step = event["step"]
    assert last("saved") == step
    assert not marked(str(here))
    # Nothing that listened while it trained could be reached from another machine.
    listening = [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    # Nor could another user of this one read what it wrote.
    paths = [here / "run", *(here / "run").rglob("*")]
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in paths if path.is_dir()} == {"0o700"}
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in paths if path.is_file()} == {"0o600"}

    done(f"resume run --set train.max_steps={step + 10} -n 1 --json -q")
    assert (last("resumed"), last("finished")) == (step, step + 10)
    # One process has memory for what one of two had in a pass.
    limit = "computes an update in 2 micro-batches of at most 32 samples, the limit from the start of the run"
    assert limit in events("run", "note")[-1]["message"]


@pytest.mark.slow
def test_stop_in_an_evaluation_saves_and_the_evaluation_is_made_on_resume(here):
    """It would take a quarter of a minute; what is seen is that it isn't waited for."""
    job = f"train synthetic:4000x1x8x8x10 {NETS}:SlowToEvaluate --epochs 2 --batch 400 -n 2 --out run {QUICKLY}"
    with training(job, "--set train.evaluate_batch=8") as process:
        wait_until((here / "evaluating").exists, process)
        ended = stop(process)
    assert last("stopped") == last("saved") == 10
    assert "evaluated=" not in ended.err

    more = done("resume run", FAULT_QUICK="1")
    assert [line[:7] for line in more.err.split(" INFO ") if "evaluated=" in line] == ["epoch=1", "epoch=2"]

    # An evaluation on its own has nothing to save, and its end is no failure either.
    (here / "evaluating").unlink()
    with training("eval run") as process:
        wait_until((here / "evaluating").exists, process)
        ended = stop(process, signal.SIGINT, code=130)
    assert ended.err.endswith("\nstopped\n")
    assert "killed" not in ended.err


@pytest.mark.slow
def test_a_short_stall_is_an_event_and_a_hung_run_ends_soon_with_the_step_that_was_saved(here):
    with training(ENDLESS, SAVING, "-n 2") as process:
        wait_until(lambda: events("run", "saved"), process)
        worker = psutil.Process(command.read("run/env.json")["ranks"][1]["pid"])
        healed = None
        for pause_s in (4, 8, 16, 32):  # on a busy machine updates take long, and so does what counts as a stall
            saved = len(events("run", "saved"))
            worker.suspend()
            time.sleep(pause_s)
            worker.resume()
            wait_until(lambda before=saved + 1: len(events("run", "saved")) > before, process)
            if healed := next((event for event in events("run", "stall") if event["data"]["seconds"] > 3), None):
                break
        assert healed, events("run", "stall")
        assert "training stalled for" in healed["message"]
        worker.suspend()
        ended = stop(process, code=130)
    assert f"(process {worker.pid} is stopped)" in ended.err
    assert f"the last checkpoint is step {last('saved')}" in ended.err
    assert f"resume from step {last('saved')}: manyhands resume run" in ended.err
    assert not marked(str(here))


@pytest.mark.parametrize(
    ("line", "during", "says"),
    [
        ("train digits mlp -n 2", "recovery.supervise_once", ""),
        ("launch digits mlp --hosts 127.0.0.1:2", "recovery.supervise_once", ""),
        ("launch digits mlp --hosts 127.0.0.1:2", "launch.prepare_machines", "stopping before training has begun\n"),
    ],
)
def test_ctrl_c_before_the_first_start_and_between_two_is_a_stop_of_the_run(line, during, says, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"manyhands.run.{during}", interrupted)
    done(line, QUICKLY, "--out run", by=inside, code=130, says=(says, "stopped before anything was saved"))
    assert "why: stopped before anything was saved" in done("why run", by=inside).out


def test_a_process_by_hand_that_is_stopped_while_it_imports_torch_says_so(here):
    """An import of torch that is broken off can't be repeated in the same process."""
    with training(ENDLESS, f"--init file://{here}/meet --world-size 1 --rank 0", by=start) as process:
        wait_until(lambda: any("libtorch" in one.path for one in psutil.Process(process.pid).memory_maps()), process)
        ended = stop(process, code=130, says="stopped before anything was saved")
    assert "Traceback" not in ended.err
    command.assert_one_screen(ended.err, where=False)


def reported(pattern, path, process):
    """A line that a process writes down while the run stands still."""
    return wait_until(lambda: re.search(pattern, Path(path).read_text() if Path(path).is_file() else ""), process)


@pytest.mark.slow
def test_waiting_ranks_started_by_hand_report_a_stopped_process_and_end_at_the_second_interrupt(here):
    """Also where the store is the stopped one's own, as rank 0's is, and the main thread hears no signal meanwhile."""
    job, place = ENDLESS.removesuffix("run"), f"--init tcp://127.0.0.1:{command.free_port()} --world-size 3 --rank"
    with contextlib.ExitStack() as stack:
        given = [(job + folder, SAVING, place, rank) for rank, folder in enumerate(("run", "other", "run"))]
        processes = [stack.enter_context(training(*each)) for each in given]
        wait_until(lambda: events("run", "saved"), processes[0])
        (listed,) = json.loads(done("ps --json", by=inside).out)
        assert (listed["pid"], listed["processes"]) == (processes[0].pid, 3)
        assert "\nrank 2 | " in done("logs run").out
        for rank in (1, 0, 2):
            hung = processes[rank]
            hung.send_signal(signal.SIGSTOP)
            words = rf"waiting for rank {rank} on \S+ \(process {hung.pid} is stopped\)"
            for each in {0, 1, 2} - {rank}:
                reported(words, f"run/ranks/{each}.log", processes[each])
            if rank != 2:
                hung.send_signal(signal.SIGCONT)
                trains_on(processes[0])
        processes[0].send_signal(signal.SIGINT)
        time.sleep(1)
        ended = stop(processes[0], signal.SIGINT, code=130)
    assert f"the last checkpoint is step {last('saved')}" in ended.err
    assert f"resume from step {last('saved')}" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "stop --now"])
def test_a_second_interrupt_or_stop_now_kills(how, here):
    """The network takes its time over the pass in which the first one comes."""
    with training(f"train synthetic:4000x1x8x8x10 {NETS}:Sleepy {LONG}", "-n 2") as process:
        wait_until((here / "asleep").exists, process)
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
            # The agent passes the first one on before the second comes.
            wait_until((here / "asked").exists, process)
            process.send_signal(signal.SIGINT)
        else:
            reported = done("stop run --now", says="without waiting for a save").out
            assert "nothing was saved" in reported
            assert "manyhands resume" not in reported
        ended = finish(process, code=130)
    command.assert_one_screen(ended.err, where=False)
    assert ended.err.count("stopping after the current update") == 1
    assert "stopped before anything was saved" in ended.err
    wait_until(lambda: not marked(str(here)))
    headline, cause, *_ = done("why run", by=inside).out.splitlines()
    assert "run was stopped without saving" in headline
    assert cause.startswith("why: stopped ")


@pytest.mark.parametrize("who", ["launcher", "agent"])
@pytest.mark.slow
def test_nothing_outlives_the_launcher_or_the_agent(who, here):
    with training(ENDLESS, "-n 2", "--elastic off" * (who == "agent")) as process:
        wait_until(begun(), process)
        members = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        (agent,) = members[0].children()
        assert len(members) >= 4
        (agent if who == "agent" else members[0]).kill()
        ended = finish(process)
        wait_until(lambda: all(map(command.has_ended, members[1:])))
    assert not marked(str(here))
    assert json.loads(done("ps --json", by=inside).out) == []
    if who == "agent":
        assert ended.code == 1
        command.assert_one_screen(ended.err)
        assert "the agent that watches the processes failed: the agent was killed by SIGKILL" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("closes", ["terminal", "pipe"])
def test_a_run_whose_reader_is_gone_saves_and_leaves_as_at_any_stop(closes, here):
    reader, writer = os.openpty() if closes == "terminal" else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands", *ENDLESS.split(), "-n", "1"],
        stdin=writer, stdout=writer, stderr=writer, start_new_session=True, env=command.environment(),
        preexec_fn=lambda: closes == "terminal" and fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(writer)
    wait_until(begun(), process)
    os.close(reader)
    if closes == "pipe":
        process.terminate()
    assert process.wait(60) == 75
    assert last("saved") == last("stopped")


JOB = f"digits mlp --epochs 100000 --set train.evaluate_every=1000 {QUICKLY}"
WHERE = "--hosts 127.0.0.1:2 --out run"


def detached(*given):
    """The process that goes on once a command has ended."""
    return json.loads(done(*given, "--detach --json", by=start).out)["pid"]


def trains_on(process=None, steps=5):
    before = len(command.metrics("run"))
    wait_until(lambda: len(command.metrics("run")) > before + steps, process)


@pytest.mark.slow
def test_detached_run_survives_launcher_and_accepts_takeover_and_stop(here):
    head = detached("launch", JOB, WHERE)
    assert os.getsid(head) == head  # so that no terminal's end comes to it
    assert command.metrics("run")
    command.refused("resume run --no-detach", says="a run is active")
    os.kill(head, signal.SIGKILL)
    trains_on(steps=20)
    with training("resume run --no-detach", by=start) as again:
        wait_until(lambda: events("run", "resumed"), again)
        trains_on(again)
        stop(again)
    assert not marked(str(here))

    head = detached("resume run")
    assert "--out" not in command.refused("resume run", says="a run is active")
    agents = psutil.Process(head).children()
    os.kill(head, signal.SIGKILL)
    trains_on(steps=20)
    stopped = len(events("run", "stopped"))
    assert "manyhands resume run" in done("stop run").out
    assert len(events("run", "stopped")) > stopped
    psutil.wait_procs(agents, timeout=60)
    assert not marked(str(here))


@pytest.mark.slow
def test_a_run_whose_agent_stands_still_and_whose_command_was_killed_is_listed_and_stopped(here):
    with training("train", JOB, "-n 2 --out run") as process:
        wait_until(lambda: command.metrics("run"), process)
        (agent,) = psutil.Process(process.pid).children()
        agent.suspend()
        process.kill()
        finish(process)
    assert "no launcher" in done("ps", by=inside).out
    assert "is active" in done("why run", by=inside).out
    assert "run has ended on this machine; the last checkpoint" in done("stop run").out
    wait_until(lambda: not marked(str(here)))
    assert done("why run", by=inside).out.startswith("run stopped after")
    assert done("ps", by=inside).out == "no run is active\n"


def test_what_fails_before_it_trains_is_said_on_the_terminal(here):
    command.refused("launch", here / "nothing", "mlp --detach", WHERE, QUICKLY, by=command.forked)
    with training("launch --detach", JOB, WHERE, by=start) as process:
        wait_until(lambda: (here / "run" / "job.toml").is_file(), process)
        process.send_signal(signal.SIGINT)
        assert finish(process).code in {75, 130}
    wait_until(lambda: not marked(str(here)))
