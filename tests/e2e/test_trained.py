"""What a run has learnt is used by itself: without its data, its published weights, or the program that made it."""

import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset
from torchvision import models

import manyhands
from manyhands.cli.main import main
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.data.open import is_plain_folder
from manyhands.report.read import read_run
from manyhands.run.tasks import evaluate_run, job_of, predict_files, resolve_checkpoint
from manyhands.train.trained import evaluate_checkpoint

QUIET = {"quiet": True, "run__report": False}
LEVELS = {"cat": 60, "dog": 130, "owl": 200}


def pictures(root, splits, size=(24, 20), classes=tuple(LEVELS)):
    chance = numpy.random.default_rng(0)
    for split, count in splits.items():
        for name in classes:
            folder = Path(root) / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                values = numpy.clip(chance.normal(LEVELS[name], 40, (size[1], size[0], 3)), 0, 255)
                Image.fromarray(values.astype("uint8")).save(folder / f"{number}.png")
    return Path(root)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a folder of pictures that is gone since; its own validation pictures lie elsewhere."""
    place = tmp_path_factory.mktemp("trained")
    data = pictures(place / "pets", {"train": 20, "val": 9})
    run = manyhands.fit("mlp", str(data), out=place / "run", epochs=3, batch=10, data__image_size=12, **QUIET)
    shutil.move(data, place / "away")
    return run, place / "away" / "val"


def right(guesses, files):
    return sum(found[0][0] == file.parent.name for file, found in zip(files, guesses, strict=True))


def test_prediction_sees_what_the_evaluation_saw(trained):
    run, val = trained
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


def evaluated(run, folder):
    """What `manyhands eval RUN FOLDER` does, in this process."""
    flags = {"data.name": str(folder)}
    checkpoint = resolve_checkpoint(run.path, "best")
    return evaluate_checkpoint(
        job_of(run.path, flags), checkpoint, World(), given=flags, whole=is_plain_folder(str(folder))
    )


def test_the_folder_that_is_named_is_evaluated_whole_and_by_names(trained, tmp_path):
    run, val = trained
    for name in ("dog", "owl"):
        shutil.copytree(val / name, tmp_path / "some" / name)
    found = evaluated(run, tmp_path / "some")
    assert found["count"] == 18
    files = sorted((tmp_path / "some").rglob("*.png"))
    assert round(found["top1"] * 18) == right(manyhands.predict(run, files), files)
    assert {row["name"] for row in found["per_class"]} == {"dog", "owl"}


def test_a_class_that_the_run_does_not_know_is_refused(trained, tmp_path):
    run, val = trained
    shutil.copytree(val / "dog", tmp_path / "other" / "wolf")
    with pytest.raises(UserError, match='the run has no class "wolf"'):
        evaluated(run, tmp_path / "other")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pictures_that_can_not_be_read_are_listed_after_all_others(trained, tmp_path, capsys, processes):
    run, val = trained
    shutil.copytree(val, tmp_path / "new")
    bad = [tmp_path / "new" / place for place in ("cat/0.png", "owl/4.png", "owl/5.png")]
    for file in bad:
        file.write_bytes(b"no picture")
    words = ["predict", str(run.path), str(tmp_path / "new"), "-n", str(processes)]
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert ended.value.code == 1
        said = capsys.readouterr()
        listed = said.err[said.err.index("pictures that can't be read: 3") :].splitlines()[1:]
        assert [line.partition(": ")[0].strip() for line in listed] == list(map(str, bad))
        lines = said.out.splitlines()
        assert len(lines) == (27 if more else 24)
    errors = {found["picture"] for found in map(json.loads, lines) if "error" in found}
    assert errors == set(map(str, bad))
    with pytest.raises(UserError, match=r"the picture 0\.png can't be read") as refused:
        manyhands.predict(run, [tmp_path / "new"])
    assert refused.value.hints[1].startswith("or skip unreadable pictures in training")


@pytest.mark.parametrize("device", ["gpu", "h100", "cuda:99"])
def test_a_device_that_is_not_here_computes_no_prediction(trained, device):
    run, val = trained
    with pytest.raises(UserError, match=f"this machine has no {device.partition(':')[0]}"):
        list(predict_files(run.path, [val], device=device))


@pytest.mark.slow
def test_prediction_over_processes_is_the_same(trained):
    run, val = trained
    one, two = (list(predict_files(run.path, [val], processes=count)) for count in (1, 2))
    assert len(one) == 27
    assert [[path, [tuple(guess) for guess in guesses]] for path, guesses in two] == [list(pair) for pair in one]


class Threshold(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, outputs))

    def forward(self, numbers):
        return self.layers(numbers)


def numbers(count=60):
    labels = torch.arange(count) % 2
    noise = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(noise * 0.2 + labels.view(-1, 1, 1, 1) * 0.2 + 0.5, labels)


def test_numbers_of_ones_own_data_set_are_not_normalised_again(tmp_path):
    data = numbers()
    run = manyhands.fit(Threshold(), data, data, epochs=30, batch=10, lr=0.2, out=tmp_path / "run", **QUIET)
    assert run.best.top1 == 1
    guesses = manyhands.predict(run, [data[number][0] for number in range(60)])
    assert [int(found[0][0]) for found in guesses] == data.tensors[1].tolist()
    Image.new("L", (4, 4), 200).save(tmp_path / "grey.png")
    with pytest.raises(UserError, match="a picture file can't be converted"):
        manyhands.predict(run, [tmp_path / "grey.png"])
    with pytest.raises(UserError, match="Threshold was a Python object"):
        manyhands.load(run.path)
    network = manyhands.load(run.path, model=Threshold()).network
    assert torch.equal(network.layers[1].weight, manyhands.load(run).network.layers[1].weight)
    with pytest.raises(UserError, match="data of this run was a Python object"):
        evaluate_run(run.path, which="best", flags={})


def colours(classes=3, size=40):
    images = torch.randint(0, 256, (12, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(12) % classes)


def test_a_run_from_published_weights_needs_them_no_more(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    file = tmp_path / "home" / "hub" / "checkpoints" / "squeezenet1_1-b8a52dc0.pth"
    file.parent.mkdir(parents=True)
    torch.save(models.squeezenet1_1().state_dict(), file)
    options = {"out": tmp_path / "run", "batch": 6, "model__pretrained": True, "lr": 1e-4, **QUIET}
    run = manyhands.fit("squeezenet1_1", colours(), colours(), epochs=1, **options)
    file.unlink()
    monkeypatch.setenv("MANYHANDS_MIRROR", "http://127.0.0.1:9")  # nothing may be fetched
    assert len(manyhands.load(run).classes) == 3
    again = manyhands.fit("squeezenet1_1", colours(), colours(), epochs=2, checkpoint__resume="auto", **options)
    assert again.final.step == 4


@pytest.mark.slow
def test_weights_of_other_classes_give_the_body_and_the_last_layer_is_new(tmp_path):
    run = manyhands.fit("cnn", colours(size=8), colours(size=8), epochs=1, batch=6, out=tmp_path / "three", **QUIET)
    body = manyhands.load(run, "best").network.state_dict()
    options = {"batch": 6, "epochs": 1, "lr": 1e-12, "weight_decay": 0.0, **QUIET}
    for number, weights in enumerate([run.path, tmp_path / "three.pth"]):
        torch.save(body, tmp_path / "three.pth")
        more = manyhands.fit(
            "cnn", colours(2, 8), colours(2, 8), out=tmp_path / str(number), model__weights=str(weights), **options
        )
        told = [event.message for event in read_run(more.path).events if event.kind == "note"]
        assert any(" not loaded: " in text and "has 3 classes, not 2" in text for text in told), told
        first, *_ = body
        assert torch.allclose(manyhands.load(more).network.state_dict()[first], body[first], atol=1e-6)
    with pytest.raises(UserError, match="the checkpoint belongs to another network") as raised:
        manyhands.fit("mlp", colours(2, 8), out=tmp_path / "x", model__weights=str(run.path), **options)
    assert "--out" not in " ".join(raised.value.hints)
    with pytest.raises(UserError, match="has 3 outputs, but the data has 2 classes") as raised:
        manyhands.fit(
            "cnn", colours(2, 8), out=tmp_path / "y", checkpoint__resume=str(tmp_path / "three.pth"), **options
        )
    assert "model__weights=" in raised.value.hints[0]
