"""ps, stop, logs and profile, beside runs that go on and of what they left."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from manyhands.core.phases import PHASES
from manyhands.report.read import read_run
from manyhands.report.time_shares import seconds_by_rank
from tests.e2e.command import (
    NETS,
    QUICKLY,
    done,
    events,
    finish,
    forked,
    free_port,
    inside,
    marked,
    metrics,
    read,
    refused,
    training,
    wait_until,
    words,
)

pytestmark = pytest.mark.timeout(300)
LONG = f"--epochs 100000 --batch 64 {QUICKLY} --out"
ENDLESS = f"train synthetic:4000x1x8x8x10 {NETS}:Talks {LONG}"


def shown(*given):
    """What a command that only reads says."""
    return done(*given, by=inside).out


def measured(folder):
    return lambda: metrics(folder)


@pytest.mark.slow
def test_ps_stop_and_logs_of_a_run_on_two_processes(here):
    ranks = here / "runs" / "first" / "ranks"
    with training(ENDLESS, here / "runs" / "first", "-n 2") as process:
        wait_until(measured("runs/first"), process)
        (told,) = json.loads(shown("ps --json"))
        assert told["run"] == str(here / "runs" / "first")
        assert (told["pid"], told["state"], told["processes"]) == (process.pid, "running", 2)
        assert told["step"] >= 1
        assert told["epoch"] >= 1
        assert told["epochs"] == 100000
        head, row = shown("ps").splitlines()
        assert head.split()[:3] == ["run", "state", "pid"]
        assert row.split()[:3] == ["runs/first", "running", str(process.pid)]

        follower = forked(*words(["logs first -f --last 3"]))
        second = forked(*words(["logs fir --rank 1 -f --last 1"]))
        ended = done("stop runs/first")
        assert "asked first" in ended.err
        (stopped,) = events("runs/first", "stopped")
        assert f"stopped and saved at step {stopped['step']}" in ended.out
        assert finish(process).code == 75
        every, one = finish(follower), finish(second)
    assert every.code == one.code == 0
    assert not [line for line in every.out.splitlines() if not re.match(r"rank [01] \| ", line)]
    for rank in (0, 1):
        # Nothing is missing between what was there and what came, up to the last line.
        said = [int(number) for number in re.findall(rf"rank {rank} \| pass (\d+) of {rank}\n", every.out)]
        assert said == list(range(said[0], said[-1] + 1))
        assert (ranks / f"{rank}.log").read_text().splitlines()[-1] in every.out
    assert one.out.splitlines()[-1] == (ranks / "1.log").read_text().splitlines()[-1]
    assert "rank 0" not in one.out
    assert shown("ps") == "no run is active\n"
    assert not marked(str(here / "runs"))

    refused("stop runs/first", says="is not active")
    assert shown("logs first --rank 0 --last 2").splitlines() == (ranks / "0.log").read_text().splitlines()[-2:]
    done("logs first --rank 7", by=inside, code=2)


@pytest.mark.slow
def test_each_rank_writes_its_own_losses_which_add_up_to_the_records(here):
    done("train digits mlp -n 2 --epochs 2 --batch 50 --out r", QUICKLY)
    pattern = r"\S+Z rank=(\d) epoch=(\d) step=(\d+)/58 loss=([\d.]+) acc=[\d.]+ samples=(\d+) all_loss=([\d.]+).*"
    found = [
        [re.fullmatch(pattern, line).groups() for line in shown("logs r --rank", rank).splitlines()]
        for rank in ("0", "1")
    ]
    steps = metrics("r")
    assert len(found[0]) == len(found[1]) == len(steps)
    for record, *own in zip(steps, *found, strict=True):
        assert [int(line[0]) for line in own] == [0, 1]
        assert {int(line[2]) for line in own} == {record["step"]}
        samples = [int(line[4]) for line in own]
        assert sum(samples) == record["samples"]
        mean = sum(float(line[3]) * count for line, count in zip(own, samples, strict=True)) / sum(samples)
        assert mean == pytest.approx(record["loss"], abs=2e-4)
    for epoch, last in ((1, 29), (2, 58)):
        of_epoch = [record for record in steps if 29 * (epoch - 1) < record["step"] <= last]
        mean = sum(record["loss"] * record["samples"] for record in of_epoch) / 1437
        assert of_epoch[-1]["epoch_loss"] == pytest.approx(mean)
        assert [record["epoch_loss"] for record in of_epoch[:-1]] == [None] * (len(of_epoch) - 1)
    environment = read("r/env.json")
    assert [rank["rank"] for rank in environment["ranks"]] == [0, 1]
    assert environment["ranks"][0]["pid"] != environment["ranks"][1]["pid"]
    assert "torch" not in environment["ranks"][1]


@pytest.mark.slow
def test_stop_now_ends_a_run_that_does_not_listen(here):
    with training(ENDLESS.replace("Talks", "Sleepy"), here / "run", "-n 2") as process:
        wait_until((here / "asleep").exists, process)
        ended = done("stop run --now")
        assert "without saving" in ended.err
        assert "nothing was saved" in ended.out
        assert "manyhands resume" not in ended.out
        assert finish(process).code == 130
    wait_until(lambda: not marked(str(here)))


@pytest.mark.slow
def test_a_run_met_by_hand_is_listed_once_and_stopped_by_its_first_process(here):
    place = f"--init tcp://127.0.0.1:{free_port()} --world-size 2 --rank"
    with training(ENDLESS, "run", place, 0) as first, training(ENDLESS, "other", place, 1) as second:
        wait_until(measured("run"), first)
        (told,) = json.loads(shown("ps --json"))
        assert (told["pid"], told["processes"]) == (first.pid, 2)
        done("logs run")
        done("stop run")
        assert finish(first).code == finish(second).code == 75


@pytest.mark.slow
def test_a_killed_head_leaves_the_list(here):
    with training(ENDLESS, here / "run") as process:
        wait_until(measured("run"), process)
        members = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: json.loads(shown("ps --json")) == [])
        psutil.wait_procs(members, timeout=60)


@pytest.mark.slow
def test_logs_of_a_machine_that_is_away_are_named(here):
    ranks = here / "run" / "ranks"
    ranks.mkdir(parents=True)
    (here / "run" / "job.toml").touch()
    (ranks / "0.log").write_text("here\nand without an end")
    places = [
        {"host": "n1", "ranks": [0, 1], "folder": str(here / "run"), "local": True},
        {"host": "away.invalid", "ranks": [1, 2], "folder": "/data/run", "local": False},
    ]
    (here / "run" / "machines.json").write_text(json.dumps(places))
    unknown = "away.invalid can't be resolved to an address"
    ended = done("logs run", by=inside, code=0)
    assert ended.out.splitlines() == ["rank 0 | here", "rank 0 | and without an end"]
    assert f"{unknown}; the logs of ranks 1 to 2 are in /data/run/ranks there" in ended.err
    refused("logs run --rank 2", code=3, says=unknown)
    (here / "run" / "machines.json").write_text("[{}]")
    refused("logs run")


@pytest.mark.parametrize("command", ["stop", "logs"])
def test_a_wrong_name_is_one_screen(command, here):
    refused(command, "no-such-run", says='no run is called "no-such-run"')


SLEPT_S = 10 * 0.1


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["true", "false"])
def test_who_waits_and_who_is_waited_for(shared):
    """Rank 1 sleeps in every forward pass: under shared memory and under DDP rank 0 waits for it, and it is named."""
    job = f"train digits {NETS}:SleepsOnRank1 -n 2 --out run --epochs 1 --device cpu {QUICKLY} --set train.max_steps=10"
    done(job, f"--set data.train_samples=640 --set parallel.shared_memory={shared}")
    first, second = seconds_by_rank(read_run(Path("run")))
    assert second["compute"] >= SLEPT_S
    assert first["communication"] >= 0.5 * SLEPT_S
    # Both trained side by side.
    assert sum(first.values()) == pytest.approx(sum(second.values()), rel=0.2)
    text = shown("profile run")
    assert all(phase in text for phase in PHASES)
    assert re.search(r"would help most: rank 1 takes [0-9.]+ times as long as the other ranks", text)
    told = json.loads(shown("profile run --json"))
    assert told["ranks"][1]["compute"] >= SLEPT_S
    assert 0 < told["change"]["gain"] <= 1


def test_a_profile_of_nothing_says_so(here):
    (here / "ranks").mkdir()
    (here / "job.toml").touch()
    assert "has no time records yet" in shown("profile .")
    refused("profile digits mlp --steps 0", says="--steps must be 1 or more, found 0", where=False)


@pytest.mark.slow
def test_a_trace_has_all_processes_phases_and_operations():
    done("profile digits mlp -n 2 --steps 3 --out traced --device cpu")
    events = read("traced/trace.json")["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.split(" on ")[0] for _, name in sorted(names.items())] == ["rank 0", "rank 1"]
    assert {event["pid"] for event in spans} == set(names)
    assert min(event["ts"] for event in spans) == 0
    assert all(event["dur"] >= 0 for event in spans)
    for pid in names:
        mine = [event for event in spans if event["pid"] == pid]
        computing = [event for event in mine if (event["tid"], event["name"]) == (0, "compute")]
        forward = [event for event in mine if event["name"] == "aten::addmm"]
        assert {"data", "compute", "communication", "update"} <= {event["name"] for event in mine if event["tid"] == 0}
        # Three updates, of two layers at least; on one clock: what computes lies where its process computed.
        assert len(forward) >= 6
        among = [one for one in forward if any(_lies_in(one, span) for span in computing)]
        assert len(among) >= 0.9 * len(forward)
    # It is a run like any other, which neither saved nor evaluated.
    assert not list(Path("traced/checkpoints").glob("step-*"))
    assert "would help most" in shown("profile traced")


def _lies_in(one, span, slack_us=1000):
    middle = one["ts"] + one["dur"] / 2
    return span["ts"] - slack_us <= middle <= span["ts"] + span["dur"] + slack_us
