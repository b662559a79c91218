"""Stops of every kind: what is saved, what is left behind, and that a run goes on exactly where it was."""

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

from manyhands.cli.main import main
from manyhands.core.terminal import say, show
from tests.e2e.command import (
    NETS,
    QUICK,
    assert_equal_weights,
    assert_one_screen,
    environment,
    events,
    final_weights,
    finish,
    free_port,
    marked,
    run,
    running,
    wait_until,
)

pytestmark = pytest.mark.timeout(600)
# Longer than any test waits.
ENDLESS = ["synthetic:4000x1x8x8x10", f"{NETS}:Net", "--epochs", "100000", "--batch", "64", *QUICK]


def begun(folder):
    return lambda: events(folder, "first-step")


def family(process):
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def outer_interface():
    """One that other machines could reach; gloo would look in vain for a name that is none."""
    return next((name for name in psutil.net_if_addrs() if name.startswith(("eth", "en"))), "eth7")


def SLOW(*values):  # noqa: N802 - it stands where a mark would
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("number", [signal.SIGUSR1, SLOW(signal.SIGINT), SLOW(signal.SIGTERM)])
def test_a_stop_saves_and_says_so(number, here):
    # As clusters' shells do, for what is between machines.
    names = {"GLOO_SOCKET_IFNAME": outer_interface(), "NCCL_SOCKET_IFNAME": outer_interface()}
    with running("train", *ENDLESS, "-n", "2", "--out", here / "run", **names) as process:
        wait_until(begun("run"), process)
        sockets = [each for member in family(process) for each in member.net_connections("inet")]
        process.send_signal(number)
        ended = finish(process)
    assert ended.code == 75, ended.err
    assert "stopped and saved at step" in ended.err
    (stopped,) = events("run", "stopped")
    assert events("run", "saved")[-1]["step"] == stopped["step"]
    assert not marked(str(here))
    # Nothing that listened while it trained could be reached from another machine.
    listening = [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    # Nor could another user of this one read what it wrote.
    paths = [here / "run", *(here / "run").rglob("*")]
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in paths if path.is_dir()} == {"0o700"}
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in paths if path.is_file()} == {"0o600"}

    more = run("resume", "run", "--set", f"train.max_steps={stopped['step'] + 10}", "-n", "1", "--json", "-q")
    assert more.code == 0, more.err
    assert events("run", "resumed")[-1]["step"] == stopped["step"]
    assert events("run", "finished")[-1]["step"] == stopped["step"] + 10


@pytest.mark.slow
def test_a_stop_in_an_evaluation_saves_and_the_evaluation_is_made_when_the_run_goes_on(here):
    """It would take a quarter of a minute; what is seen is that it isn't waited for."""
    job = ["synthetic:4000x1x8x8x10", f"{NETS}:SlowToEvaluate", "--epochs", "2", "--batch", "400", *QUICK, "-n", "2"]
    with running("train", *job, "--set", "train.evaluate_batch=8", "--out", here / "run") as process:
        wait_until((here / "evaluating").exists, process)
        process.send_signal(signal.SIGTERM)
        ended = finish(process)
    assert ended.code == 75, ended.err
    (stopped,) = events("run", "stopped")
    assert stopped["step"] == events("run", "saved")[-1]["step"] == 10
    assert "evaluated=" not in ended.err

    more = run("resume", "run", FAULT_QUICK="1")
    assert more.code == 0, more.err
    assert [line[:7] for line in more.err.split(" INFO ") if "evaluated=" in line] == ["epoch=1", "epoch=2"]

    # An evaluation on its own has nothing to save, and its end is no failure either.
    (here / "evaluating").unlink()
    with running("eval", "run") as process:
        wait_until((here / "evaluating").exists, process)
        process.send_signal(signal.SIGINT)
        ended = finish(process)
    assert ended.code == 130, ended.err
    assert ended.err.endswith("\nstopped\n")
    assert "killed" not in ended.err


@pytest.mark.slow
def test_a_short_stall_is_an_event_and_a_hung_run_ends_soon_with_the_step_that_was_saved(here):
    job = [*ENDLESS, "-n", "2", "--set", "checkpoint.every=20steps", "--set", "train.evaluate_every=1000"]
    with running("train", *job, "--out", here / "run") as process:
        wait_until(lambda: events("run", "saved"), process)
        worker = psutil.Process(json.loads((here / "run" / "env.json").read_text())["ranks"][1]["pid"])
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
        process.send_signal(signal.SIGTERM)
        ended = finish(process)
    assert ended.code == 130, ended.err
    assert f"(process {worker.pid} is stopped)" in ended.err
    step = events("run", "saved")[-1]["step"]
    assert f"the last checkpoint is step {step}" in ended.err
    assert f"resume from step {step}: manyhands resume {here / 'run'}" in ended.err
    assert not marked(str(here))


def test_a_launch_that_is_stopped_while_it_prepares_says_so_and_ends(here):
    with running("launch", *ENDLESS, "--hosts", "localhost:2", "--out", here / "run") as process:
        wait_until((here / "run" / "ranks" / "agent.log").exists, process)
        process.send_signal(signal.SIGTERM)
        ended = finish(process)
    assert ended.code == 130, ended.err
    assert "stopping before training has begun" in ended.err
    assert "stopped before anything was saved" in ended.err
    assert "resume" not in ended.err
    wait_until(lambda: not marked(str(here)))
    told = run("why", "run").out
    assert "run was ended at once" in told.splitlines()[0], told
    assert "why: stopped before anything was saved" in told


# As torchrun sets them.
PLACE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("number", "by_variables"), [(signal.SIGTERM, False), SLOW(signal.SIGINT, False), SLOW(signal.SIGINT, True)]
)
def test_a_process_by_hand_that_is_stopped_while_it_imports_torch_says_so(number, by_variables, here):
    """An import of torch that is broken off can't be repeated in the same process."""
    flags = ["--init", f"file://{here}/meet", "--world-size", "1", "--rank", "0"]
    place = {**PLACE, "MASTER_PORT": str(free_port())} if by_variables else {}
    with running("train", *ENDLESS, *([] if by_variables else flags), "--out", "run", **place) as process:
        wait_until(lambda: any("libtorch" in one.path for one in psutil.Process(process.pid).memory_maps()), process)
        process.send_signal(number)
        ended = finish(process)
    assert ended.code == 130, ended.err
    assert "stopped before anything was saved" in ended.err
    assert "Traceback" not in ended.err
    assert_one_screen(ended.err, where=False)


@pytest.mark.slow
def test_a_process_by_hand_that_waits_for_a_hung_one_ends_at_the_second_interrupt(here):
    """Its main thread is in a collective, where no handler of Python's is called."""
    job = ["train", *ENDLESS, "--set", "checkpoint.every=20steps", "--set", "train.evaluate_every=1000", "--out", "run"]
    job += ["--init", f"file://{here}/meet", "--world-size", "2"]
    with running(*job, "--rank", "0") as process, running(*job, "--rank", "1") as other:
        wait_until(lambda: events("run", "saved"), process)
        other.send_signal(signal.SIGSTOP)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        ended = finish(process)
    assert ended.code == 130, ended.err
    step = events("run", "saved")[-1]["step"]
    assert f"the last checkpoint is step {step}" in ended.err
    assert f"resume from step {step}" in ended.err


def torchrun(processes):
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "manyhands"]


def process_of(rank):
    ranks = json.loads(Path("run/env.json").read_text())["ranks"]
    return psutil.Process(next(each["pid"] for each in ranks if each["rank"] == rank))


def told(pattern, path, process):
    """A line that a process writes down while the run stands still."""
    return wait_until(lambda: re.search(pattern, Path(path).read_text() if Path(path).is_file() else ""), process)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "written"), [(0, "run/ranks/1.log"), (2, "run/events.jsonl")])
def test_under_torchrun_one_of_the_others_names_a_stopped_process(rank, written, here):
    """The first of those that wait, for their screen is one."""
    with running("train", *ENDLESS, "--out", "run", program=torchrun(3)) as process:
        wait_until(begun("run"), process)
        hung = process_of(rank)
        hung.suspend()
        words = rf"waiting for rank {rank} on \S+ \(process {hung.pid} is stopped\); .*: kill -CONT {hung.pid}"
        told(rf"step \d+ has been stalled for \d+ s.*{words}", written, process)
        hung.resume()
        process.send_signal(signal.SIGTERM)
        ended = finish(process)
    assert ended.err.count("waiting for rank") == 1, ended.err


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [("file", 1), ("tcp", 0), ("tcp", 1)])
def test_by_hand_all_that_wait_name_a_stopped_process(kind, rank, here):
    """Also where the store is the stopped one's own."""
    rendezvous = f"file://{here}/meet" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    job = ["train", *ENDLESS, "--out", "run", "--init", rendezvous, "--world-size", "3", "--rank"]
    with running(*job, "0") as zero, running(*job, "1") as one, running(*job, "2") as two:
        processes = [zero, one, two]
        wait_until(begun("run"), zero)
        hung = processes.pop(rank)
        hung.send_signal(signal.SIGSTOP)
        words = rf"waiting for rank {rank} on \S+ \(process {hung.pid} is stopped\)"
        for each in processes:
            told(words, f"run/ranks/{[zero, one, two].index(each)}.log", each)
        hung.send_signal(signal.SIGCONT)
        zero.send_signal(signal.SIGTERM)
        assert [finish(each).code for each in (zero, one, two)] == [75] * 3


@pytest.mark.slow
def test_a_second_interrupt_kills(here):
    """The network takes its time over the pass in which the first one comes."""
    with running("train", *ENDLESS[:1], f"{NETS}:Sleepy", *ENDLESS[2:], "-n", "2", "--out", here / "run") as process:
        wait_until((here / "asleep").exists, process)
        process.send_signal(signal.SIGINT)
        # The agent passes the first one on before the second comes.
        wait_until((here / "asked").exists, process)
        process.send_signal(signal.SIGINT)
        ended = finish(process)
    assert ended.code == 130, ended.err
    assert_one_screen(ended.err, where=False)
    assert ended.err.count("stopping after the current update") == 1
    assert "stopped before anything was saved" in ended.err
    wait_until(lambda: not marked(str(here)))


@pytest.mark.parametrize("who", ["launcher", "agent"])
@pytest.mark.slow
def test_nothing_outlives_the_launcher_or_the_agent(who, here):
    with running("train", *ENDLESS, "-n", "2", "--elastic", "off", "--out", here / "run") as process:
        wait_until(begun("run"), process)
        members = family(process)
        (agent,) = (each for each in members if "manyhands.cluster.agents.agent" in " ".join(each.cmdline()[:4]) and
                    each.ppid() == process.pid)  # fmt: skip
        assert len(members) >= 4
        (agent if who == "agent" else members[0]).kill()
        ended = finish(process)
        psutil.wait_procs(members[1:], timeout=120)
        assert not [each for each in members[1:] if each.is_running()]
    assert not marked(str(here))
    if who == "agent":
        assert ended.code == 1
        assert_one_screen(ended.err)
        assert "the agent that watches the processes failed: the agent was killed by SIGKILL" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_a_killed_worker_is_named_and_the_run_goes_on_to_the_same_bits(processes, here):
    job = ["synthetic:1000x1x8x8x10", f"{NETS}:Killed", "--batch", "50", "--epochs", "2", *QUICK]
    job += ["--set", "checkpoint.every=7steps", "-n", processes, "--elastic", "off"]
    fault = {"FAULT_MARKER": str(here / "marker"), "FAULT_CALL": "13"}
    ended = run("train", *job, "--out", "run", **fault)
    assert ended.code == 1
    assert_one_screen(ended.err)
    # It is said at once, and again, first of all, once all is cleaned up.
    told, _, screen = ended.err.partition("manyhands: ")
    assert re.search(r"WARNING rank 1 on \S+ was killed by SIGKILL; cleaning up", told)
    assert screen.startswith("rank 1 was killed by SIGKILL\n")
    assert "memory" in ended.err
    assert "resume from the last checkpoint, of step" in ended.err
    assert not marked(str(here))

    # The marker is there, so nothing happens any more; one step into the second epoch the run is stopped once more.
    for limit in ("31", "0"):
        ended = run("resume", "run", "--set", f"train.max_steps={limit}", **fault)
        assert ended.code == 0, ended.err
    assert [event["step"] for event in events("run", "resumed")] == [7, 31]
    ended = run("train", *job, "--out", "whole", **fault)
    assert ended.code == 0, ended.err
    assert_equal_weights(final_weights("run"), final_weights("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("committed", [True, False])
def test_a_rank_that_is_killed_while_the_run_stops_takes_no_checkpoint_away(committed, here):
    """With exit code 75 exactly where the checkpoint of the stop is complete; either way the run resumes."""
    checkpoints = here / "run" / "checkpoints"

    def is_committed():
        return any((checkpoints / f"step-{event['step']:08}").is_dir() for event in events("run", "stopping"))

    with running("train", *ENDLESS, "-n", "2", "--out", "run") as process:
        wait_until(begun("run"), process)
        (agent,) = psutil.Process(process.pid).children()
        rank_1 = max(agent.children(), key=lambda worker: worker.pid)
        process.send_signal(signal.SIGTERM)
        if committed:
            wait_until(is_committed)
        with contextlib.suppress(psutil.NoSuchProcess):  # it has left already
            rank_1.kill()
        ended = finish(process)
    last = max(checkpoints.glob("step-*")).name
    if committed or events("run", "stopped"):
        assert ended.code == 75, ended.err
        assert events("run", "stopped")[-1]["step"] == int(last.removeprefix("step-"))
    else:
        assert ended.code == 1, ended.err
        assert "rank 1 was killed by SIGKILL" in ended.err
        assert f"of step {int(last.removeprefix('step-'))}" in ended.err
    again = run("resume", "run", "--set", f"train.max_steps={int(last.removeprefix('step-')) + 2}")
    assert again.code == 0, again.err
    assert not marked(str(here))


def test_what_is_shown_on_a_closed_terminal_is_no_error(monkeypatch):
    """As a pipe that nobody reads; the exit code is for those who look at the command itself."""
    master, slave = os.openpty()
    os.close(master)
    closed = os.fdopen(slave, "w")
    monkeypatch.setattr("sys.stderr", closed)
    with pytest.raises(BrokenPipeError):
        show("a result", sys.stderr)
    say("a line")
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", "nosuchnetwork", "--dry-run"])
    assert ended.value.code == 2
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        closed.close()


@pytest.mark.slow
@pytest.mark.parametrize("closes", ["terminal", "pipe"])
def test_a_run_whose_reader_is_gone_saves_and_leaves_as_at_any_stop(closes, here):
    reader, writer = os.openpty() if closes == "terminal" else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands", "train", *map(str, ENDLESS), "-n", "1", "--out", "run"],
        stdin=writer, stdout=writer, stderr=writer, start_new_session=True, env=environment(),
        preexec_fn=lambda: closes == "terminal" and fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(writer)
    wait_until(begun("run"), process)
    os.close(reader)
    if closes == "pipe":
        process.terminate()
    assert process.wait(60) == 75
    assert events("run", "saved")[-1]["step"] == events("run", "stopped")[-1]["step"]
