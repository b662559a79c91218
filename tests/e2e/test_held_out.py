"""What decided nothing is evaluated once, at the end, with the best and the last weights, and reported as test."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import manyhands
from manyhands.core.errors import UserError
from manyhands.report.page import write_report
from manyhands.report.read import read_run
from manyhands.report.summary import result_lines, result_object
from tests.e2e.command import events
from tests.e2e.test_trained import LEVELS, pictures
from tests.processes.ranks import run_on_ranks

FIT = {"epochs": 3, "batch": 10, "lr": 0.3, "data__image_size": 12, "quiet": True, "run__report": False}


def evaluated(run, folder, which):
    network, transform, classes = manyhands.load(run, which)
    files = sorted(Path(folder).rglob("*.png"))
    hits = [classes[network(transform(file)[None]).argmax()] == file.parent.name for file in files]
    return sum(hits) / len(hits), len(hits)


@pytest.mark.slow
def test_a_test_folder_beside_train_and_val_is_evaluated_at_the_end(here):
    data = pictures(here / "pets", {"train": 20, "val": 4, "test": 9})
    run = manyhands.fit("mlp", str(data), out="run", **FIT)
    for which in ("best", "last"):
        found = json.loads((run.path / "evaluations" / f"test-{which}.json").read_text())
        right, count = evaluated(run.path, data / "test", which)
        assert (found["count"], found["top1"]) == (count, pytest.approx(right))
    assert run.test.count == 9 * len(LEVELS)
    assert run.best.count == run.final.count == 4 * len(LEVELS)
    (told,) = events("run", "tested")
    assert "held-out samples" in told["message"]
    read = read_run(run.path)
    assert any(line.startswith("test  top-1") for line in result_lines(read))
    assert result_object(read)["test_top1"] == run.test.top1
    page = write_report(run.path).read_text()
    assert "test top-1, best weights" in page
    assert "selected on these samples" not in page
    # Once: what is done for these weights isn't done again.
    manyhands.fit("mlp", str(data), out="run", **FIT)
    assert len(events("run", "tested")) == 1


def test_the_network_has_its_last_weights_again_afterwards(here):
    chance = torch.Generator().manual_seed(0)
    sets = [TensorDataset(torch.rand(30, 1, 4, 4, generator=chance), torch.arange(30) % 3) for _ in range(3)]
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    options = {**FIT, "epochs": 9, "batch": 5, "lr": 3.0}
    run = manyhands.fit(network, sets[0], sets[1], held_out_set=sets[2], out="run", **options)
    assert run.best.step != run.final.step
    assert run.test.step == run.best.step
    last = manyhands.load(run.path, "last", model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)))
    assert torch.equal(last.network[1].weight, network[1].weight)
    images, labels = sets[2].tensors
    final = read_run(run.path).tests["last"]
    assert final.top1 == pytest.approx(float((network(images).argmax(1) == labels).double().mean()))


def test_without_one_the_best_figure_is_said_to_be_chosen_by(here):
    run = manyhands.fit("mlp", "synthetic:60x1x8x8x3", out="run", **{**FIT, "data__image_size": 8})
    assert run.test is None
    assert any("selected on these samples" in line for line in result_lines(read_run(run.path)))
    assert result_object(read_run(run.path))["test_top1"] is None
    assert "selected on these samples" in write_report(run.path).read_text()


def test_a_third_data_set_may_be_named(here):
    data = pictures(here / "pets", {"train": 20, "val": 4})
    pictures(here / "more", {"new": 5})
    run = manyhands.fit("mlp", str(data), out="run", data__held_out="more/new", **FIT)
    assert run.test.count == 5 * len(LEVELS)
    (here / "more" / "new" / "wolf").mkdir()
    (here / "more" / "new" / "wolf" / "a.png").write_bytes(next((here / "more/new/dog").iterdir()).read_bytes())
    with pytest.raises(UserError, match='no class "wolf"'):
        manyhands.fit("mlp", str(data), out="other", data__held_out="more/new", **FIT)


def test_a_test_folder_without_labels_is_said(here):
    data = pictures(here / "pets", {"train": 20, "val": 4})
    (data / "test").mkdir()
    (data / "test" / "a.png").write_bytes(next((data / "val" / "dog").iterdir()).read_bytes())
    run = manyhands.fit("mlp", str(data), out="run", **FIT)
    assert run.test is None
    assert any("test/ is not evaluated" in event["message"] for event in events("run", "warning"))


def _trained(world, folder, mode):
    from manyhands.config.load import load_job
    from manyhands.core.run_folder import RunFolder
    from manyhands.train.build import build
    from manyhands.train.loop import fit
    from manyhands.train.parts import Parts

    flags = {
        "data.name": "synthetic:60x1x8x8x3", "data.held_out": "synthetic:70x1x8x8x3", "model.name": "mlp",
        "train.epochs": 4, "train.batch": 12, "train.lr": 1.0, "train.precision": "fp64", "train.channels_last": False,
    }  # fmt: skip
    place = RunFolder(Path(folder))
    place.ranks.mkdir(parents=True, exist_ok=True)
    trainer = build(
        Parts.from_job(load_job(flags, environment={}).job, place, world, "single" if world.alone else mode)
    )
    fit(trainer)
    trainer.resources.close()
    return {name: found.top1 for name, found in read_run_tests(place).items()} if world.is_main else {}


def read_run_tests(folder):
    folder.job.touch()
    return read_run(folder.path).tests


@pytest.mark.parametrize("mode", ["data", "fsdp"])
def test_the_test_is_the_same_over_processes(mode, tmp_path):
    alone = run_on_ranks(_trained, 1, str(tmp_path / "one"), mode)[0]
    together = run_on_ranks(_trained, 2, str(tmp_path / "two"), mode)[0]
    assert set(alone) == {"best", "last"}
    assert together == alone
