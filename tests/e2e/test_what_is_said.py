"""What a run says of itself: its speed, its data, and what a user should know of both."""

import re
import time
from datetime import datetime
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import manyhands
from manyhands.report.read import read_run
from manyhands.report.summary import result_lines
from tests.e2e import nets
from tests.e2e.command import done, events, inside, messages, metrics
from tests.e2e.nets import tiny

pytestmark = pytest.mark.timeout(300)


def fit(*given, **options):
    return manyhands.fit(*given, **{"quiet": True, "run__report": False, "out": "run", "epochs": 1, **options})


def pictures(*places):
    for place in places:
        Path(place).parent.mkdir(exist_ok=True, parents=True)
        Image.new("L", (8, 8)).save(place)


class Unhurried(nets.Net):
    """Takes a fiftieth of a second at each call."""

    def act(self):
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            continue


def test_saves_between_two_records_leave_the_time_of_training_as_it_was():
    fit(Unhurried(), tiny(200), batch=20, checkpoint__every="1steps", run__log_every_s=60)
    steps = metrics("run")
    assert sum(line["samples"] for line in steps) == 180
    for line in steps:
        assert line["samples"] / line["images_per_s"] >= line["samples"] / 20 * 0.02


def test_a_run_says_first_what_is_trained_on_what(capfd):
    fit(nets.Net(), tiny(40), epochs=2, batch=9, lr=0.1, run__report=True)
    (setup,) = messages("run", "setup")
    parameters = sum(each.numel() for each in nets.Net().parameters())
    assert setup.split("\n") == [
        "data: TensorDataset, 36 training and 4 evaluation samples, 10 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
        f"network: Net, {parameters:,} parameters",
        "training: epochs 2, updates an epoch 4, batch 9, sgd at learning rate 0.1, processes 1, device cpu",
    ]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "data: Tensor" in line]
    assert line.endswith(setup.replace("\n", " | "))
    page = Path("run/report.html").read_text()
    assert all(f"<div>{line}</div>" in page.partition("<dl>")[0] for line in setup.split("\n"))


class Slow(nn.Module):
    """Takes a tenth of a second at each call, and two seconds at the first."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        time.sleep(2 if self.calls == 1 else 0.1)
        return self.fc(x.flatten(1))


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"processes": 2, "parallel__mode": "semi"}, marks=pytest.mark.slow)]
)
def test_a_slow_network_is_announced_with_the_time_of_an_epoch_before_its_first_update(options):
    fit(Slow(), tiny(1000), batch=30, train__max_steps=1, **options)
    (note,) = [event for event in events("run", "note") if "expected time" in event["message"]]
    assert note["time"] < events("run", "first-step")[0]["time"]
    update, epoch = re.fullmatch(r"expected time: ([\d.]+) s per update, (\d+) min per epoch", note["message"]).groups()
    if not options:
        assert 3 <= float(update) < 10
        assert 1 <= int(epoch) < 6


def test_what_is_trained_on_is_said_before_anything_is_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    fit(network, tiny(40), batch=9, precision="auto")
    kinds = [event["message"].split(" ")[0] for event in events("run") if event.get("message")]
    assert kinds.count("data:") == 1
    assert kinds.index("data:") < kinds.index("benchmarking")


@pytest.mark.parametrize(
    ("names", "shown"), [([f"class {n}" for n in range(1000)], "class 0, class 1, "), (["é\n", "b"], "é, b")]
)
def test_many_classes_are_named_in_part(names, shown):
    data = tiny(40, labels=len(names))
    data.classes = names
    fit(nn.Sequential(nn.Flatten(), nn.Linear(64, len(names))), data, batch=36)
    line = messages("run", "setup")[0].split("\n")[0]
    assert f" {len(names):,} classes: {shown}" in line
    assert len(line) < 160
    assert line.endswith(" …") == (len(names) > 10)


ANIMALS = ["ant", "wasp", "fly", "bee"]
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
            for classes, missing in ((ANIMALS, "bee"), (None, "3"))
        ),
    ],
)
def test_what_data_lack_is_a_warning_with_quiet_too(sets, options, warning, capsys):
    outputs = 5 if FEW in sets else 4 if len(sets) == 2 else 10
    fit(nets.Net(outputs), *sets, **options)
    assert warning in messages("run", "warning")
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize("quiet", [False, True])
def test_a_log_names_what_is_not_read_of_a_folder(quiet, capsys):
    pictures("pets/cat/1.png", "pets/cat/2.png", "pets/dog/1.png", "pets/dog/2.png", "pets/dog/3.png")
    for place in ("cat/1.heic", "cat/2.heic", "dog/1.HEIC", "labels.csv", "@eaDir"):
        Path("pets", place).touch()
    fit("mlp", "pets", batch=4, quiet=quiet)
    log = capsys.readouterr().err
    assert "WARNING unused files and folders (5): 3 .heic (such as cat/1.heic), labels.csv, @eaDir" in log
    assert "WARNING .csv files are not read" in log
    assert "WARNING .heic pictures can't be read" in log


def dry_run(*given, code=0):
    return done("train", *given, "--dry-run", by=inside, code=code)


def test_a_dry_run_says_what_would_be_trained_on_and_where_it_would_be_kept():
    pictures("pets/cat/1.png", "pets/cat/2.png", "pets/dog/1.png", "pets/dog/2.png", "pets/dog/3.png")
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
    pictures("one/cat/1.png")
    assert "only one class folder" in dry_run("one mlp", code=2).err


def test_the_help_names_what_a_dry_run_does_not_check():
    shown = re.sub(r"[│\s]+", " ", done("train --help", by=inside).out)
    assert "does not check pictures, memory, your own code or other machines" in shown


def test_a_plan_for_a_batch_larger_than_the_data_says_so():
    planned = done("plan synthetic:20x1x8x8x3 mlp --batch 8192 --no-measure --link 1gbit", by=inside)
    assert "each update uses all 20 training samples, fewer than the batch of 8,192" in planned.err


def test_top5_of_few_classes_is_not_said_and_that_a_run_has_finished_is(capsys):
    fit(nets.Net(5), FEW, batch=10, quiet=False)
    assert "top1=" in (said := capsys.readouterr().err)
    assert "top5=" not in said
    assert "top-5" not in "".join(result_lines(read_run(Path("run"))))
    fit(nets.Net(5), FEW, batch=10)
    again = "the same program with out='run', epochs=2, checkpoint__resume=\"auto\""
    assert messages("run", "resumed")[-1] == f"all 4 updates of this run are complete (to train longer: {again})"
