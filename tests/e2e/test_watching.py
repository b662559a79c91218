"""What a run says of itself, its data and its time, and what ps, stop, logs and profile say of it."""

import json
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from manyhands.core.phases import PHASES
from manyhands.report.read import read_run
from manyhands.report.time_shares import seconds_by_rank
from tests.data.sets import make
from tests.e2e import command, nets
from tests.e2e.command import NETS, QUICKLY, done, events, finish, fit, inside, metrics, read, refused, training
from tests.e2e.nets import tiny

pytestmark = pytest.mark.timeout(300)
LONG = f"--epochs 100000 --batch 64 {QUICKLY} --out"
ENDLESS = f"train synthetic:4000x1x8x8x10 {NETS}:Talks {LONG}"


def shown(*given):
    """What a command that only reads says."""
    return done(*given, by=inside).out


@pytest.mark.slow
def test_ps_stop_and_logs_of_a_run_on_two_processes(here):
    ranks = here / "runs" / "first" / "ranks"
    with training(ENDLESS, here / "runs" / "first", "-n 2") as process:
        command.wait_until(lambda: metrics("runs/first"), process)
        (reported,) = json.loads(shown("ps --json"))
        assert reported["run"] == str(here / "runs" / "first")
        assert (reported["pid"], reported["state"], reported["processes"]) == (process.pid, "running", 2)
        assert min(reported["step"], reported["epoch"]) >= 1
        assert reported["epochs"] == 100000
        head, row = shown("ps").splitlines()
        assert head.split()[:3] == ["run", "state", "pid"]
        assert row.split()[:3] == ["runs/first", "running", str(process.pid)]

        follower = command.begin("logs first -f --last 3")
        second = command.begin("logs fir --rank 1 -f --last 1")
        ended = done("stop runs/first", says="asked first")
        (stopped,) = events("runs/first", "stopped")
        assert f"stopped and saved at step {stopped['step']}" in ended.out
        finish(process, code=75)
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
    assert not command.marked(str(here / "runs"))

    refused("stop runs/first", says="is not active")
    assert shown("logs first --rank 0 --last 2").splitlines() == (ranks / "0.log").read_text().splitlines()[-2:]
    done("logs first --rank 7", by=inside, code=2)


@pytest.mark.slow
def test_each_rank_writes_its_own_losses_which_add_up_to_the_records(here):
    done("train digits mlp -n 2 --epochs 2 --batch 50 --out r", QUICKLY)
    pattern = r"\S+Z rank=(\d) epoch=\d step=(\d+)/58 loss=([\d.]+) acc=[\d.]+ samples=(\d+) all_loss=[\d.]+.*"

    def own_lines(rank):
        lines = shown(f"logs r --rank {rank}").splitlines()
        return [[float(word) for word in re.fullmatch(pattern, line).groups()] for line in lines]

    steps = metrics("r")
    for record, *own in zip(steps, own_lines(0), own_lines(1), strict=True):
        assert [(rank, step) for rank, step, *_ in own] == [(rank, record["step"]) for rank in (0, 1)]
        assert sum(samples for *_, samples in own) == record["samples"]
        mean = sum(loss * samples for *_, loss, samples in own) / record["samples"]
        assert mean == pytest.approx(record["loss"], abs=2e-4)
    for epoch, last in ((1, 29), (2, 58)):
        of_epoch = [record for record in steps if 29 * (epoch - 1) < record["step"] <= last]
        for key in ("loss", "top1"):
            mean = sum(record[key] * record["samples"] for record in of_epoch) / 1437
            assert of_epoch[-1][f"epoch_{key}"] == pytest.approx(mean)
            assert [record[f"epoch_{key}"] for record in of_epoch[:-1]] == [None] * (len(of_epoch) - 1)
    environment = read("r/env.json")
    assert [rank["rank"] for rank in environment["ranks"]] == [0, 1]
    assert environment["ranks"][0]["pid"] != environment["ranks"][1]["pid"]
    assert "torch" not in environment["ranks"][1]


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
    reported = json.loads(shown("profile run --json"))
    assert reported["ranks"][1]["compute"] >= SLEPT_S
    assert 0 < reported["change"]["gain"] <= 1


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


class Slow(nn.Module):
    """Takes so many seconds at each call, and more at the first."""

    def __init__(self, seconds, first=0.0):
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.seconds, self.more = seconds, first

    def forward(self, x):
        time.sleep(self.seconds + self.more)
        self.more = 0.0
        return self.fc(x.flatten(1))


def test_saves_between_two_records_leave_the_time_of_training_as_it_was():
    fit(Slow(0.02), tiny(200), batch=20, checkpoint__every="1steps", run__log_every_s=60)
    steps = metrics("run")
    assert sum(line["samples"] for line in steps) == 180
    for line in steps:
        assert line["samples"] / line["images_per_s"] >= line["samples"] / 20 * 0.02


def test_a_run_says_first_what_is_trained_on_what(capfd):
    fit(nets.Net(), tiny(40), epochs=2, batch=9, lr=0.1)
    (setup,) = command.messages("run", "setup")
    parameters = sum(each.numel() for each in nets.Net().parameters())
    assert setup.split("\n") == [
        "data: TensorDataset, 36 training and 4 evaluation samples, 10 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
        f"network: Net, {parameters:,} parameters",
        "training: epochs 2, updates an epoch 4, batch 9, sgd at learning rate 0.1, processes 1, device cpu",
    ]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "data: Tensor" in line]
    assert line.endswith(setup.replace("\n", " | "))


def test_many_classes_are_named_in_part():
    data = tiny(40, labels=1000)
    data.classes = [f"class {number}" for number in range(1000)]
    fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 1000)), data, batch=36)
    line = command.messages("run", "setup")[0].split("\n")[0]
    assert " 1,000 classes: class 0, class 1, " in line
    assert len(line) < 160


def test_a_slow_network_is_announced_with_the_time_of_an_epoch_before_its_first_update():
    fit(Slow(0.1, first=2.0), tiny(1000), batch=30, train__max_steps=1)
    (note,) = [event for event in events("run", "note") if "expected time" in event["message"]]
    assert note["time"] < events("run", "first-step")[0]["time"]
    update, epoch = re.fullmatch(r"expected time: ([\d.]+) s per update, (\d+) min per epoch", note["message"]).groups()
    assert 3 <= float(update) < 10
    assert 1 <= int(epoch) < 6


FEW = TensorDataset(torch.rand(40, 1, 8, 8), torch.tensor([0, 1, 3, 4]).repeat(10))


def of_animals(labels, classes):
    data = tiny(40, labels)
    if classes:
        data.classes = classes
    return data


@pytest.mark.parametrize(
    ("sets", "options", "warning"),
    [
        ([tiny(40)], {"batch": 8192}, "each update uses all 36 training samples, fewer than the batch of 8,192"),
        ([FEW], {"batch": 10}, "1 of 5 classes have no training sample: 2"),
        *(
            (
                [of_animals(4, classes), of_animals(3, classes)],
                {"batch": 10},
                f"1 of 4 classes have no test sample, so no evaluation covers them: {missing}",
            )
            for classes, missing in ((["ant", "wasp", "fly", "bee"], "bee"), (None, "3"))
        ),
    ],
)
def test_what_data_lack_is_a_warning_with_quiet_too(sets, options, warning, capsys):
    outputs = 5 if FEW in sets else 4 if len(sets) == 2 else 10
    fit(nets.Net(outputs), *sets, **options)
    assert warning in command.messages("run", "warning")
    assert warning in capsys.readouterr().err


def dry_run(*given, code=0):
    return done("train", *given, "--dry-run", by=inside, code=code)


def test_a_dry_run_says_what_would_be_trained_on_and_where_it_would_be_kept():
    help_page = re.sub(r"[│\s]+", " ", done("train --help", by=inside).out)
    assert "does not check pictures, memory, your own code or other machines" in help_page
    for name, count in (("cat", 2), ("dog", 3)):
        make(Path("pets"), (name,), count)
    folder = f"runs/{datetime.now():%Y-%m-%d}-pets-mlp"
    shown = dry_run("pets mlp --device cpu").out
    assert "with 4 training and 1 evaluation pictures, 2 classes: cat, dog\nas 1 process on this machine\n" in shown
    assert shown.endswith(f"into {folder}\n")
    assert not Path("runs").exists()
    Path(folder).mkdir(parents=True)
    assert f"as 3 processes on this machine\ninto {folder}-2\n" in dry_run("pets mlp -n 3").out
    shown = dry_run("digits mlp --out here").out
    assert "with 1,437 training and 360 evaluation pictures, 10 classes: 0, 1, 2" in shown
    assert shown.endswith("into here\n")
    # It warns of a batch larger than the data, and refuses a folder that cannot be trained on.
    for data, samples in ("digits", "1,437"), ("pets", "4"):
        warning = f"all {samples} training samples, fewer than the batch of 5,000"
        assert warning in dry_run(data, "mlp --batch 5000").err
    assert "the batch" not in dry_run("digits mlp --batch 1437").err
    Path("none").mkdir()
    assert "no class folders" in dry_run("none mlp", code=2).err
