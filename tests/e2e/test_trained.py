"""What a run has learnt is used without its data or the program that made it, and evaluated on what was held out."""

import json
import shutil
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torchvision import models

import manyhands
from manyhands.core.errors import UserError
from manyhands.report.page import write_report
from manyhands.report.read import read_run
from manyhands.report.summary import result_lines, result_object
from manyhands.run import tasks
from manyhands.run.tasks import evaluate_run, predict_files
from tests.e2e.command import done, events, fit, forked, inside, messages, read, refused
from tests.e2e.nets import tiny

LEVELS = {"cat": 60, "dog": 130, "owl": 200}


def pictures(root, splits):
    chance = numpy.random.default_rng(0)
    for split, count in splits.items():
        for name, level in LEVELS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                values = numpy.clip(chance.normal(level, 40, (20, 24, 3)), 0, 255)
                Image.fromarray(values.astype("uint8")).save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a folder of pictures that is gone since; its own validation pictures lie elsewhere."""
    place = tmp_path_factory.mktemp("trained")
    data = pictures(place / "pets", {"train": 20, "val": 9})
    run = fit("mlp", str(data), out=place / "run", epochs=3, batch=10, data__image_size=12)
    shutil.move(data, place / "away")
    return run, place / "away" / "val"


def right(guesses, files):
    return sum(found[0][0] == file.parent.name for file, found in zip(files, guesses, strict=True))


USES = {
    "eval": lambda run, val, _: evaluate_run(run, which="best", flags={"data.name": str(val)})["top1"],
    "predict": lambda run, val, _: list(predict_files(run, [val])),
    "load": lambda run, *_: manyhands.load(run).classes,
    "show": lambda run, *_: tasks.describe_checkpoint(run, which="best")["step"],
    "convert": lambda run, _, target: tasks.rewrite_checkpoint(run, target, which="best"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_checkpoint_that_training_removes_meanwhile_is_chosen_again(use, trained, tmp_path):
    (run, val), choices, resolve = trained, iter([Path("gone")]), tasks.resolve_checkpoint
    expected = use(run.path, val, tmp_path / "before.pth")
    with mock.patch.object(tasks, "resolve_checkpoint", lambda *given: next(choices, None) or resolve(*given)):
        assert use(run.path, val, tmp_path / "again.pth") == expected
    gone = mock.patch.object(tasks, "resolve_checkpoint", return_value=Path("gone"))
    with gone, pytest.raises(UserError, match="deleted each chosen checkpoint"):
        use(run.path, val, tmp_path / "never.pth")
    assert not (tmp_path / "never.pth").exists()


def test_prediction_sees_what_the_evaluation_saw(trained):
    run, val = trained
    refused("predict", run.path, val, "--device h100", says="this machine has no h100")
    files = sorted(val.rglob("*.png"))
    guesses = manyhands.predict(run.path, [val])
    assert right(guesses, files) == round(run.best.top1 * run.best.count)
    assert [name for name, _ in sorted(guesses[0])] == list(LEVELS)
    assert manyhands.predict(run, [Image.open(file) for file in files[:3]]) == manyhands.predict(run, files[:3])
    one = manyhands.predict(run, files[:1])
    assert manyhands.predict(run, Image.open(files[0])) == one
    pixels = numpy.asarray(Image.open(files[0]).convert("RGB"))
    assert manyhands.predict(run, pixels) == manyhands.predict(run, torch.tensor(pixels).permute(2, 0, 1)) == one


def test_a_copied_run_gives_its_network_back(trained, tmp_path):
    run, val = trained
    copy = shutil.copytree(run.path, tmp_path / "copy")
    network, transform, classes = manyhands.load(copy)
    file = next((val / "dog").iterdir())
    image = transform(file)
    assert image.shape == (3, 12, 12)
    assert classes == tuple(LEVELS)
    ((_, wanted),) = predict_files(copy, [file])
    scores = network(image[None]).softmax(1)[0]
    assert dict(wanted) == pytest.approx(dict(zip(classes, scores.tolist(), strict=True)))
    checkpoint = max((copy / "checkpoints").glob("step-*"))
    alone = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    assert torch.equal(manyhands.load(alone).network(image[None]), manyhands.load(copy, "last").network(image[None]))


def test_named_folder_is_evaluated_completely_and_by_class_names(trained, tmp_path):
    run, val = trained
    for name in ("dog", "owl"):
        shutil.copytree(val / name, tmp_path / "some" / name)
    found = json.loads(done("eval", run.path, tmp_path / "some", "--json", by=inside).out)
    assert found["count"] == 18
    files = sorted((tmp_path / "some").rglob("*.png"))
    assert round(found["top1"] * 18) == right(manyhands.predict(run, files), files)
    assert {row["name"] for row in found["per_class"]} == {"dog", "owl"}
    (tmp_path / "some" / "dog").rename(tmp_path / "some" / "wolf")
    refused("eval", run.path, tmp_path / "some", says='the run has no class "wolf"')


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pictures_that_can_not_be_read_are_listed_after_all_others(trained, tmp_path, processes):
    run, val = trained
    shutil.copytree(val, tmp_path / "new")
    bad = [str(tmp_path / "new" / place) for place in ("cat/0.png", "owl/4.png", "owl/5.png")]
    for file in bad:
        Path(file).write_bytes(b"no picture")
    by, shown = inside, [("", 24), ("--json", 27)]
    if processes == 2:
        by, shown = forked, shown[1:]
    for more, count in shown:
        said = done("predict", run.path, tmp_path / "new", "-n", processes, more, by=by, code=1)
        listed = said.err[said.err.index("pictures that can't be read: 3") :].splitlines()[1:]
        assert [line.partition(": ")[0].strip() for line in listed] == bad
        assert len(said.out.splitlines()) == count
    assert [found["picture"] for found in map(json.loads, said.out.splitlines()) if "error" in found] == bad
    if processes == 2:
        assert said.out == done("predict", run.path, tmp_path / "new", more, by=inside, code=1).out
    with pytest.raises(UserError, match=r"the picture 0\.png can't be read") as caught:
        manyhands.predict(run, [tmp_path / "new"])
    assert caught.value.hints[1].startswith("or skip unreadable pictures in training")


def threshold():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


def numbers(count=60):
    labels = torch.arange(count) % 2
    noise = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(noise * 0.2 + labels.view(-1, 1, 1, 1) * 0.2 + 0.5, labels)


def test_numbers_of_ones_own_data_set_are_not_normalized_again(tmp_path):
    data = numbers()
    run = fit(threshold(), data, data, epochs=30, batch=10, lr=0.2)
    assert run.best.top1 == 1
    guesses = manyhands.predict(run, [data[number][0] for number in range(60)])
    assert [int(found[0][0]) for found in guesses] == data.tensors[1].tolist()
    Image.new("L", (4, 4), 200).save(tmp_path / "grey.png")
    with pytest.raises(UserError, match="a picture file can't be converted"):
        manyhands.predict(run, [tmp_path / "grey.png"])
    with pytest.raises(UserError, match="Sequential was a Python object"):
        manyhands.load(run.path)
    network = manyhands.load(run.path, model=threshold()).network
    assert torch.equal(network[1].weight, manyhands.load(run).network[1].weight)
    with pytest.raises(UserError, match="data of this run was a Python object"):
        evaluate_run(run.path, which="best", flags={})


def colors(classes=3, size=40):
    images = torch.randint(0, 256, (12, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(12) % classes)


def test_a_run_from_published_weights_needs_them_no_more(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    file = tmp_path / "home" / "hub" / "checkpoints" / "squeezenet1_1-b8a52dc0.pth"
    file.parent.mkdir(parents=True)
    torch.save(models.squeezenet1_1().state_dict(), file)
    options = {"batch": 6, "model__pretrained": True, "lr": 1e-4}
    run = fit("squeezenet1_1", colors(), colors(), **options)
    file.unlink()
    monkeypatch.setenv("MANYHANDS_MIRROR", "http://127.0.0.1:9")  # nothing may be fetched
    assert len(manyhands.load(run).classes) == 3
    again = fit("squeezenet1_1", colors(), colors(), epochs=2, checkpoint__resume="auto", **options)
    assert again.final.step == 4


@pytest.mark.slow
def test_weights_of_other_classes_give_the_body_and_the_last_layer_is_new(tmp_path):
    run = fit("cnn", colors(size=8), colors(size=8), batch=6, out="three")
    body, two = manyhands.load(run, "best").network.state_dict(), (colors(2, 8), colors(2, 8))
    torch.save(body, "three.pth")
    options = {"batch": 6, "lr": 1e-12, "weight_decay": 0.0}
    for number, weights in enumerate((run.path, "three.pth")):
        more = fit("cnn", *two, out=str(number), model__weights=str(weights), **options)
        reported = messages(more.path, "note")
        assert any(" not loaded: " in text and "has 3 classes, not 2" in text for text in reported), reported
        first, *_ = body
        assert torch.allclose(manyhands.load(more).network.state_dict()[first], body[first], atol=1e-6)
    with pytest.raises(UserError, match="the checkpoint belongs to another network") as raised:
        fit("mlp", two[0], out="x", model__weights=str(run.path), **options)
    assert "--out" not in " ".join(raised.value.hints)
    with pytest.raises(UserError, match="has 3 outputs, but the data has 2 classes") as raised:
        fit("cnn", two[0], out="y", checkpoint__resume="three.pth", **options)
    assert "model__weights=" in raised.value.hints[0]


FIT = {"epochs": 3, "batch": 10, "lr": 0.3, "data__image_size": 12}


@pytest.mark.slow
def test_a_test_folder_beside_train_and_val_is_evaluated_at_the_end(here):
    data = pictures(here / "pets", {"train": 20, "val": 4, "test": 9})
    run = fit("mlp", str(data), **FIT)
    files = sorted((data / "test").rglob("*.png"))
    for which in ("best", "last"):
        found = read(run.path, "evaluations", f"test-{which}.json")
        hits = right(manyhands.predict(run.path, files, which=which), files)
        assert (found["count"], found["top1"]) == (len(files), pytest.approx(hits / len(files)))
    assert run.test.count == 9 * len(LEVELS)
    assert run.best.count == run.final.count == 4 * len(LEVELS)
    (reported,) = events("run", "tested")
    assert "held-out samples" in reported["message"]
    record = read_run(run.path)
    assert any(line.startswith("test  top-1") for line in result_lines(record))
    assert result_object(record)["test_top1"] == run.test.top1
    page = write_report(run.path).read_text()
    assert "test top-1, best weights" in page
    assert "selected on the evaluation samples" not in page
    # Once: what is done for these weights isn't done again.
    fit("mlp", str(data), **FIT)
    assert len(events("run", "tested")) == 1


def test_the_network_has_its_last_weights_again_afterwards(here):
    chance = torch.Generator().manual_seed(0)
    sets = [TensorDataset(torch.rand(30, 1, 4, 4, generator=chance), torch.arange(30) % 3) for _ in range(3)]
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    options = {**FIT, "epochs": 9, "batch": 5, "lr": 3.0}
    run = fit(network, sets[0], sets[1], held_out_set=sets[2], **options)
    assert run.best.step != run.final.step
    assert run.test.step == run.best.step
    last = manyhands.load(run.path, "last", model=nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    assert torch.equal(last.network[1].weight, network[1].weight)
    images, labels = sets[2].tensors
    final = read_run(run.path).tests["last"]
    assert final.top1 == pytest.approx(float((network(images).argmax(1) == labels).double().mean()))


def test_without_labels_a_test_folder_is_not_evaluated_and_the_best_figure_is_said_to_be_chosen_by(here):
    data = pictures(here / "pets", {"train": 20, "val": 4})
    (data / "test").mkdir()
    (data / "test" / "a.png").write_bytes(next((data / "val" / "dog").iterdir()).read_bytes())
    run = fit("mlp", str(data), **FIT)
    assert run.test is None
    assert any("test/ is not evaluated" in message for message in messages("run", "warning"))
    assert any("selected on the evaluation samples" in line for line in result_lines(read_run(run.path)))
    assert result_object(read_run(run.path))["test_top1"] is None


@pytest.mark.parametrize("mode", ["data", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_test_is_the_same_over_processes(mode):
    options = {"epochs": 4, "batch": 12, "lr": 1.0, "precision": "fp64", "data__held_out": "synthetic:70x1x8x8x3"}
    found = []
    for processes in ({}, {"processes": 2, "parallel__mode": mode}):
        run = fit("mlp", "synthetic:60x1x8x8x3", out=f"run{len(found)}", **options, **processes)
        found.append({name: tested.top1 for name, tested in read_run(run.path).tests.items()})
    assert found[0] == found[1]
    assert found[0].keys() == {"best", "last"}


class Fixed(nn.Module):
    """Gives one output the highest score, whatever the picture."""

    def __init__(self, outputs, favorite):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("lead", nn.functional.one_hot(torch.tensor(favorite), outputs) * 100.0)

    def forward(self, images):
        return (self.scores + self.lead).expand(len(images), -1)


def test_a_guess_beyond_the_classes_is_a_wrong_one():
    run = fit(Fixed(1000, 874), tiny(20), tiny(20), batch=8)
    assert run.final.top1 == 0
    detail = read_run(run.path).last
    assert len(detail.classes) == 1000
    assert {guess for _, guess, _ in detail.confusion} == {874}
    assert any("1,000 outputs for 10 classes" in note for note in messages(run.path, "note"))
    with manyhands.session() as here:
        found = here.evaluate(Fixed(50, 30), tiny(20), classes=10)
    assert found.top1 == 0
    assert found.confusion.shape == (31, 31)
    assert found.confusion[:, 30].sum() == 20
    with pytest.raises(UserError, match="the label of sample 5 is 5, but there are 5 classes"):
        manyhands.evaluate(Fixed(5, 0), tiny(20))


class Secret(Dataset):
    """Doesn't say its labels before a sample is read; one is beyond the classes."""

    classes = ("cat", "dog")

    def __init__(self, wrong, count=40):
        self.wrong, self.count = wrong, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(1, 4, 4), self.wrong if index == 13 else index % 2


def doubled(output, labels):
    return nn.functional.cross_entropy(output, labels) * 2


FROM_ONE, HALVES = (TensorDataset(torch.rand(20, 1, 4, 4), torch.arange(20) % 2 + first) for first in (1, 0))
SWAPPED = TensorDataset(torch.arange(20) % 2, torch.rand(20, 1, 16, 16))
REFUSED = [
    (1000, [Secret(7)], {}, "the label of sample 13 is 7, but there are 2 classes", ""),
    (1000, [Secret(0), Secret(-1)], {}, "the label of sample 13 is -1, but there are 2 classes", ""),
    (2, [FROM_ONE], {}, r"the shape \[\d, 2\] for \d pictures and 3 classes", "or number the labels from 0 to 1"),
    (2, [FROM_ONE], {"loss": doubled}, r"the shape \[\d, 2\] for \d pictures", "or number the labels from 0 to 1"),
    (1, [HALVES], {}, r"the shape \[\d, 1\] for \d pictures and 2 classes", ""),
    (2, [SWAPPED], {}, r"sample 0 is of shape \[1, 16, 16\] and type float32, not a", "return (x, y): the label comes"),
]


@pytest.mark.parametrize(("outputs", "sets", "options", "says", "hint"), REFUSED)
def test_samples_that_can_not_be_trained_on_are_refused(outputs, sets, options, says, hint):
    with pytest.raises(UserError, match=says) as raised:
        fit(Fixed(outputs, 0), *sets, batch=8, **options)
    assert hint in "\n".join(raised.value.hints)
    assert len(str(raised.value)) < 500
