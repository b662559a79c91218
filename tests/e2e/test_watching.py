"""ps, stop and logs, beside runs that go on."""

import json
import re
import signal

import psutil
import pytest

from tests.e2e.command import (
    NETS,
    QUICK,
    assert_one_screen,
    events,
    finish,
    forked,
    free_port,
    marked,
    run,
    running,
    start,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)
TALKS = NETS.with_name("talks.py")
ENDLESS = ["synthetic:4000x1x8x8x10", f"{TALKS}:Talks", "--epochs", "100000", "--batch", "64", *QUICK]


def measured(folder):
    return lambda: (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_size


@pytest.mark.slow
def test_ps_stop_and_logs_of_a_run_on_two_processes(here):
    with running("train", *ENDLESS, "-n", "2", "--out", here / "runs" / "first") as process:
        wait_until(measured(here / "runs" / "first"), process)
        (told,) = json.loads(run("ps", "--json").out)
        assert told["run"] == str(here / "runs" / "first")
        assert (told["pid"], told["state"], told["processes"]) == (process.pid, "running", 2)
        assert told["step"] >= 1
        assert told["epoch"] >= 1
        assert told["epochs"] == 100000
        head, row = run("ps").out.splitlines()
        assert head.split()[:3] == ["run", "state", "pid"]
        assert row.split()[:3] == ["runs/first", "running", str(process.pid)]

        follower = start("logs", "first", "-f", "--last", "3")
        second = start("logs", "fir", "--rank", "1", "-f", "--last", "1")
        ended = run("stop", "runs/first")
        assert ended.code == 0, ended.err
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
        log = (here / "runs" / "first" / "ranks" / f"{rank}.log").read_text().splitlines()
        assert log[-1] in every.out
    assert one.out.splitlines()[-1] == (here / "runs" / "first" / "ranks" / "1.log").read_text().splitlines()[-1]
    assert "rank 0" not in one.out
    assert run("ps").out == "no run is active\n"
    assert not marked(str(here / "runs"))

    late = run("stop", "runs/first")
    assert late.code == 2
    assert_one_screen(late.err)
    assert "is not active" in late.err
    after = run("logs", "first", "--rank", "0", "--last", "2")
    assert after.out.splitlines() == (here / "runs" / "first" / "ranks" / "0.log").read_text().splitlines()[-2:]
    assert run("logs", "first", "--rank", "7").code == 2


@pytest.mark.slow
def test_each_rank_writes_its_own_losses_which_add_up_to_the_records(here):
    ended = run("train", "digits", "mlp", "-n", "2", "--epochs", "2", "--batch", "50", "--out", "r", *QUICK)
    assert ended.code == 0, ended.err
    pattern = r"\S+Z rank=(\d) epoch=(\d) step=(\d+)/58 loss=([\d.]+) acc=[\d.]+ samples=(\d+) all_loss=([\d.]+).*"
    found = [
        [re.fullmatch(pattern, line).groups() for line in run("logs", "r", "--rank", rank).out.splitlines()]
        for rank in ("0", "1")
    ]
    records = [json.loads(line) for line in (here / "r" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
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
    environment = json.loads((here / "r" / "env.json").read_text())
    assert [rank["rank"] for rank in environment["ranks"]] == [0, 1]
    assert environment["ranks"][0]["pid"] != environment["ranks"][1]["pid"]
    assert "torch" not in environment["ranks"][1]


@pytest.mark.slow
def test_stop_now_ends_a_run_that_does_not_listen(here):
    with running("train", *ENDLESS[:1], f"{NETS}:Sleepy", *ENDLESS[2:], "-n", "2", "--out", here / "run") as process:
        wait_until((here / "asleep").exists, process)
        ended = run("stop", "run", "--now")
        assert ended.code == 0, ended.err
        assert "without saving" in ended.err
        assert "nothing was saved" in ended.out
        assert "manyhands resume" not in ended.out
        assert finish(process).code == 130
    wait_until(lambda: not marked(str(here)))


@pytest.mark.slow
def test_a_run_met_by_hand_is_listed_once_and_stopped_by_its_first_process(here):
    place = ["--init", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2"]
    with (
        running("train", *ENDLESS, *place, "--rank", "0", "--out", here / "run", by=forked) as first,
        running("train", *ENDLESS, *place, "--rank", "1", by=forked) as second,
    ):
        wait_until(measured(here / "run"), first)
        (told,) = json.loads(run("ps", "--json").out)
        assert (told["pid"], told["processes"]) == (first.pid, 2)
        assert run("logs", "run").code == 0
        assert run("stop", "run").code == 0
        assert finish(first).code == finish(second).code == 75


@pytest.mark.slow
def test_a_killed_head_leaves_the_list(here):
    with running("train", *ENDLESS, "--out", here / "run") as process:
        wait_until(measured(here / "run"), process)
        members = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: json.loads(run("ps", "--json").out) == [])
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
    ended = run("logs", "run")
    assert ended.out.splitlines() == ["rank 0 | here", "rank 0 | and without an end"]
    assert (
        "away.invalid can't be resolved to an address; the logs of ranks 1 to 2 are in /data/run/ranks there"
        in ended.err
    )
    ended = run("logs", "run", "--rank", "2")
    assert ended.code == 3
    assert_one_screen(ended.err)
    assert "away.invalid can't be resolved to an address" in ended.err
    (here / "run" / "machines.json").write_text("[{}]")
    ended = run("logs", "run")
    assert ended.code == 2
    assert_one_screen(ended.err)


@pytest.mark.parametrize("command", ["stop", "logs"])
def test_a_wrong_name_is_one_screen(command, here):
    ended = run(command, "no-such-run")
    assert ended.code == 2
    assert_one_screen(ended.err)
    assert 'no run is called "no-such-run"' in ended.err
