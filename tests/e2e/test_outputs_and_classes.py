"""Networks whose outputs aren't the data's classes, and data whose labels aren't."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import manyhands
from manyhands.core.errors import UserError
from manyhands.report.read import read_run

QUIET = {"quiet": True, "run__report": False, "out": "run", "batch": 8}


class Fixed(nn.Module):
    """Gives one output the highest score, whatever the picture."""

    def __init__(self, outputs, favourite):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("lead", nn.functional.one_hot(torch.tensor(favourite), outputs) * 100.0)

    def forward(self, images):
        return (self.scores + self.lead).expand(len(images), -1)


def tens(count=20):
    return TensorDataset(torch.rand(count, 1, 4, 4), torch.arange(count) % 10)


def test_a_guess_beyond_the_classes_is_a_wrong_one():
    run = manyhands.fit(Fixed(1000, 874), tens(), tens(), epochs=1, **QUIET)
    assert run.final.top1 == 0
    detail = read_run(run.path).last
    assert len(detail.classes) == 1000
    assert {guess for _, guess, _ in detail.confusion} == {874}
    notes = [event.message for event in read_run(run.path).events if event.kind == "note"]
    assert any("1,000 outputs for 10 classes" in note for note in notes)


def test_so_it_is_without_a_run():
    with manyhands.session() as here:
        found = here.evaluate(Fixed(50, 30), tens(), classes=10)
    assert found.top1 == 0
    assert found.confusion.shape == (31, 31)
    assert found.confusion[:, 30].sum() == 20


class Secret(Dataset):
    """Doesn't say its labels before a sample is read; one is beyond the classes."""

    classes = ("cat", "dog")

    def __init__(self, wrong, count=40):
        self.wrong, self.count = wrong, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(1, 4, 4), self.wrong if index == 13 else index % 2


@pytest.mark.parametrize("wrong", [7, -1])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_label_that_only_its_sample_tells_is_checked(wrong, split):
    sets = [Secret(wrong if word == split else 0) for word in ("train", "test")]
    with pytest.raises(UserError, match=f"the label of sample 13 is {wrong}, but there are 2 classes"):
        manyhands.fit(Fixed(1000, 0), *sets, epochs=1, **QUIET)


def test_labels_beyond_the_outputs_are_refused_without_a_run():
    with pytest.raises(UserError, match="the label of sample 5 is 5, but there are 5 classes"):
        manyhands.evaluate(Fixed(5, 0), tens())


def test_a_network_that_returns_something_else_besides_is_told_what_is_wanted():
    class Two(Fixed):
        def forward(self, images):
            return super().forward(images), images

    with pytest.raises(UserError, match=r"returns a tuple of a tensor \[2, 10\], a tensor \[2, 1, 4, 4\]"):
        manyhands.fit(Two(10, 0), tens(), epochs=1, **QUIET)


@pytest.mark.parametrize(("outputs", "first"), [(2, 1), (1, 0)])
@pytest.mark.parametrize("loss", [None, lambda output, labels: nn.functional.cross_entropy(output, labels) * 2])
def test_labels_beyond_the_outputs_are_refused_before_training(outputs, first, loss):
    data = TensorDataset(torch.rand(20, 1, 4, 4), first + (torch.arange(20) + 1) % 2)
    shown = rf"the shape \[\d, {outputs}\] for \d pictures and {2 + first} classes"
    with pytest.raises(UserError, match=shown) as raised:
        manyhands.fit(Fixed(outputs, 0), data, epochs=1, loss=loss, **QUIET)
    assert ("or number the labels from 0 to 1" in raised.value.hints) == (outputs == 2)


def test_swapped_samples_are_described_in_a_few_words():
    swapped = TensorDataset(torch.arange(20) % 2, torch.rand(20, 1, 16, 16))
    with pytest.raises(UserError, match=r"sample 0 is of shape \[1, 16, 16\] and type float32, not a") as raised:
        manyhands.fit(Fixed(2, 0), swapped, epochs=1, **QUIET)
    assert raised.value.hints == ("return (x, y): the label comes second",)
    assert len(str(raised.value)) < 300


def test_negative_labels_are_named():
    data = TensorDataset(torch.rand(20, 1, 4, 4), -(torch.arange(20) % 2))
    with pytest.raises(UserError, match="the label of sample 1 is -1"):
        manyhands.fit(Fixed(2, 0), data, epochs=1, **QUIET)
