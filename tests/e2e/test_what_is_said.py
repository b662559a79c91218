"""What a run says of itself: its speed, its data, and what a user should know of both."""

import re
import time
from datetime import datetime
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import manyhands
from manyhands.cli.main import main
from manyhands.core.records import read_lines
from manyhands.report.read import read_run
from manyhands.report.summary import result_lines
from tests.e2e import nets
from tests.e2e.command import finish, forked

pytestmark = pytest.mark.timeout(300)
QUIET = {"quiet": True, "run__report": False, "out": "run"}


def told(kind):
    return [line for line in read_lines(Path("run/events.jsonl")) if line["kind"] == kind]


def tiny(count=40, labels=10):
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(images, torch.arange(count) % labels)


class Unhurried(nets.Net):
    """Takes a fiftieth of a second at each call."""

    def act(self):
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            continue


def test_saves_between_two_records_leave_the_time_of_training_as_it_was():
    manyhands.fit(Unhurried(), tiny(200), epochs=1, batch=20, checkpoint__every="1steps", run__log_every_s=60, **QUIET)
    steps = [line for line in read_lines(Path("run/metrics.jsonl")) if line["kind"] == "step"]
    assert sum(line["samples"] for line in steps) == 180
    for line in steps:
        assert line["samples"] / line["images_per_s"] >= line["samples"] / 20 * 0.02


def test_a_run_says_first_what_is_trained_on_what(capfd):
    manyhands.fit(nets.Net(), tiny(40), epochs=2, batch=9, lr=0.1, quiet=True, out="run")
    (setup,) = told("setup")
    parameters = sum(each.numel() for each in nets.Net().parameters())
    assert setup["message"].split("\n") == [
        "data: TensorDataset, 36 training and 4 evaluation samples, 10 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
        f"network: Net, {parameters:,} parameters",
        "training: epochs 2, updates an epoch 4, batch 9, sgd at learning rate 0.1, processes 1, device cpu",
    ]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "data: Tensor" in line]
    assert line.endswith(setup["message"].replace("\n", " | "))
    page = Path("run/report.html").read_text()
    assert all(f"<div>{line}</div>" in page.partition("<dl>")[0] for line in setup["message"].split("\n"))


class Slow(torch.nn.Module):
    """Takes a tenth of a second at each call, and two seconds at the first."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(64, 10)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        time.sleep(2 if self.calls == 1 else 0.1)
        return self.fc(x.flatten(1))


def test_a_slow_network_is_announced_with_the_time_of_an_epoch_before_its_first_update():
    manyhands.fit(Slow(), tiny(1000), epochs=1, batch=30, train__max_steps=1, **QUIET)
    notes = [event["message"] for event in told("note") if "expected time" in event["message"]]
    assert len(notes) == 1
    update, epoch = re.fullmatch(r"expected time: ([\d.]+) s per update, (\d+) min per epoch", notes[0]).groups()
    assert 3 <= float(update) < 10
    assert 1 <= int(epoch) < 6
    assert told("note")[-1]["time"] < told("first-step")[0]["time"]


def test_the_time_of_an_epoch_is_announced_under_a_plan_too():
    options = {"processes": 2, "parallel__mode": "semi", "train__max_steps": 1, "batch": 30}
    manyhands.fit(Slow(), tiny(1000), epochs=1, **options, **QUIET)
    (note,) = [event for event in told("note") if "expected time" in event["message"]]
    assert note["time"] < told("first-step")[0]["time"]


def test_what_is_trained_on_is_said_before_anything_is_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 10))
    manyhands.fit(network, tiny(40), epochs=1, batch=9, **QUIET | {"precision": "auto"})
    kinds = [event["message"].split(" ")[0] for event in read_lines(Path("run/events.jsonl")) if event.get("message")]
    assert kinds.count("data:") == 1
    assert kinds.index("data:") < kinds.index("benchmarking")


@pytest.mark.parametrize(
    ("names", "shown"), [([f"class {n}" for n in range(1000)], "class 0, class 1, "), (["é\n", "b"], "é, b")]
)
def test_many_classes_are_named_in_part(names, shown):
    data = tiny(40, labels=len(names))
    data.classes = names
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, len(names)))
    manyhands.fit(network, data, epochs=1, batch=36, **QUIET)
    line = told("setup")[0]["message"].split("\n")[0]
    assert f" {len(names):,} classes: {shown}" in line
    assert len(line) < 160
    assert line.endswith(" …") == (len(names) > 10)


def test_a_batch_larger_than_the_data_is_said_with_quiet_too(capsys):
    manyhands.fit(nets.Net(), tiny(40), epochs=1, batch=8192, **QUIET)
    too_large = "each update uses all 36 training samples, fewer than the batch of 8,192"
    assert too_large in [event["message"] for event in told("warning")]
    assert too_large in capsys.readouterr().err


@pytest.mark.parametrize("quiet", [False, True])
def test_a_log_names_what_is_not_read_of_a_folder(quiet, capsys):
    for place in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", "dog/3.png"):
        Path("pets", place).parent.mkdir(exist_ok=True, parents=True)
        Image.new("L", (8, 8)).save(Path("pets", place))
    for place in ("cat/1.heic", "cat/2.heic", "dog/1.HEIC", "labels.csv", "@eaDir"):
        Path("pets", place).touch()
    manyhands.fit("mlp", "pets", epochs=1, batch=4, **QUIET | {"quiet": quiet})
    log = capsys.readouterr().err
    assert "WARNING unused files and folders (5): 3 .heic (such as cat/1.heic), labels.csv, @eaDir" in log
    assert "WARNING .csv files are not read" in log
    assert "WARNING .heic pictures can't be read" in log


def dry_run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, words), "--dry-run"])
    return ended.value.code


def test_a_dry_run_says_what_would_be_trained_on_and_where_it_would_be_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("pets/cat/1.png", "pets/cat/2.png", "pets/dog/1.png", "pets/dog/2.png", "pets/dog/3.png"):
        (tmp_path / place).parent.mkdir(exist_ok=True, parents=True)
        Image.new("L", (8, 8)).save(tmp_path / place)
    folder = f"runs/{datetime.now():%Y-%m-%d}-pets-mlp"
    assert dry_run("pets", "mlp", "--device", "cpu") == 0
    shown = capsys.readouterr().out
    assert "with 4 training and 1 evaluation pictures, 2 classes: cat, dog\nas 1 process on this machine\n" in shown
    assert shown.endswith(f"into {folder}\n")
    assert not Path("runs").exists()
    Path(folder).mkdir(parents=True)
    assert dry_run("pets", "mlp", "-n", 3) == 0
    assert f"as 3 processes on this machine\ninto {folder}-2\n" in capsys.readouterr().out
    assert dry_run("digits", "mlp", "--out", "here") == 0
    shown = capsys.readouterr().out
    assert "with 1,437 training and 360 evaluation pictures, 10 classes: 0, 1, 2" in shown
    assert shown.endswith("into here\n")


def test_the_help_names_what_a_dry_run_does_not_check(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    assert "does not check pictures, memory, your own code or other machines" in shown


@pytest.mark.parametrize(("places", "what"), [([], "no class folders"), (["cat"], "only one class folder")])
def test_a_dry_run_refuses_a_folder_that_cannot_be_trained_on(tmp_path, capsys, places, what):
    for place in places:
        (tmp_path / place).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / place / "1.png")
    assert dry_run(tmp_path, "mlp") == 2
    assert what in capsys.readouterr().err


def test_a_dry_run_warns_of_a_batch_larger_than_the_data(tmp_path, capsys):
    for place in ("a/1.png", "a/2.png", "b/1.png", "b/2.png", "b/3.png"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / place)
    for data, samples in (("digits", "1,437"), (str(tmp_path), "4")):
        with pytest.raises(SystemExit) as ended:
            main(["train", data, "mlp", "--batch", "5000", "--dry-run"])
        assert ended.value.code == 0
        assert f"all {samples} training samples, fewer than the batch of 5,000" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "digits", "mlp", "--batch", "1437", "--dry-run"])
    assert "the batch" not in capsys.readouterr().err


@pytest.mark.parametrize("named", [True, False])
def test_a_class_without_an_evaluation_sample_is_a_warning_with_quiet_too(named, capsys):
    train, test = tiny(40, 4), tiny(40, 3)
    if named:
        train.classes = test.classes = ["ant", "wasp", "fly", "bee"]
    manyhands.fit(nets.Net(4), train, test, epochs=1, batch=10, **QUIET)
    missing = f"no test sample, so no evaluation covers them: {'bee' if named else '3'}"
    assert f"1 of 4 classes have {missing}" in [event["message"] for event in told("warning")]
    assert missing in capsys.readouterr().err


def test_a_plan_for_a_batch_larger_than_the_data_says_so():
    planned = finish(
        forked("plan", "synthetic:20x1x8x8x3", "mlp", "--batch", "8192", "--no-measure", "--link", "1gbit")
    )
    assert "each update uses all 20 training samples, fewer than the batch of 8,192" in planned.err


def test_what_nobody_can_learn_top5_of_few_classes_and_a_run_that_has_finished(capsys):
    images = torch.rand(40, 1, 8, 8)
    few = TensorDataset(images, torch.tensor([0, 1, 3, 4]).repeat(10))
    manyhands.fit(nets.Net(5), few, epochs=1, batch=10, run__report=False, out="run")
    assert "1 of 5 classes have no training sample: 2" in [x["message"] for x in told("warning")]
    assert "top1=" in (said := capsys.readouterr().err)
    assert "top5=" not in said
    assert "top-5" not in "".join(result_lines(read_run(Path("run"))))
    manyhands.fit(nets.Net(5), few, epochs=1, batch=10, **QUIET)
    again = "the same program with out='run', epochs=2, checkpoint__resume=\"auto\""
    left = f"all 4 updates of this run are complete (to train longer: {again})"
    assert told("resumed")[-1]["message"] == left


def test_a_loss_that_grows_is_told_of_once():
    manyhands.fit(nets.Net(), tiny(200), epochs=6, batch=20, lr=30.0, optimizer="adamw", schedule="constant", **QUIET)
    (warned,) = [x["message"] for x in told("warning") if "diverges" in x["message"]]
    assert "reduce train.lr" in warned
