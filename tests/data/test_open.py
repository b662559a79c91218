import os
import textwrap

import numpy
import pytest
import torch
from PIL import Image
from tests.data.sets import make, write_mnist
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from manyhands.core.errors import UserError
from manyhands.data.loading import open_loader
from manyhands.data.open import open_data, resolve_pixels, wrap_data_sets
from manyhands.data.options import DataOptions, others_can_write, private_folder
from manyhands.data.samples import stored_labels
from manyhands.data.splits import ImagesInMemory, UserSamples, map_labels_by_name
from manyhands.data.transforms import Pixels

PIXELS = Pixels(32, 3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "crop-flip")
PLAIN = DataOptions()


def test_options_win_then_the_model_then_the_data():
    assert resolve_pixels(PLAIN, PIXELS) == PIXELS
    model = resolve_pixels(PLAIN, PIXELS, model_channels=1, model_size=224)
    assert (model.size, model.channels) == (224, 1)
    assert model.mean == pytest.approx((0.2,))
    assert model.std == pytest.approx((0.5,))
    user = DataOptions(image_size=64, channels=3, mean=(0.5,), std=(0.1, 0.2, 0.3), augment="none")
    found = resolve_pixels(user, PIXELS, model_channels=1, model_size=224)
    assert found == Pixels(64, 3, (0.5,) * 3, (0.1, 0.2, 0.3), "none")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: resolve_pixels(DataOptions(mean=(0.1, 0.2)), PIXELS), "2 values were given for 3 channels"),
        (lambda: resolve_pixels(DataOptions(std=(0.1, 0.0, 0.1)), PIXELS), "must be above zero"),
        (lambda: open_data(DataOptions(name="mnits")), '(?s)no data set is called "mnits".*did you mean "mnist"?'),
        (lambda: open_data(DataOptions(name="./none")), "there is no folder"),
        (lambda: open_data(DataOptions(name="torchvision:MNITS")), "no torchvision data set"),
        (lambda: open_data(DataOptions(name="synthetic:1x2")), "not a synthetic data set"),
        (lambda: wrap_data_sets(Stream(), None, PLAIN), "not a map-style data set"),
        (lambda: wrap_data_sets(tensors(0), None, PLAIN), "the train set is empty"),
        (lambda: wrap_data_sets(tensors(), tensors(0), PLAIN), "the test set is empty"),
        (lambda: wrap_data_sets(tensors(classes=1), None, PLAIN), "only one class"),
        (lambda: wrap_data_sets(labelled(0, -1, 1), None, PLAIN), "the label of sample 1 is -1"),
        (lambda: wrap_data_sets(tensors(), labelled(0, 1, -1), PLAIN), "the label of sample 2 is -1"),
    ],
)
def test_what_cannot_be_opened_is_refused(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()


def test_limits_are_spread_and_nested(tmp_path):
    few, more = (open_data(DataOptions(train_samples=count, test_samples=7)) for count in (20, 60))
    assert (len(few.train), len(few.test)) == (20, 7)
    assert few.description.endswith("of which 20 + 7 are used")
    rows = {bytes(image.flatten().tolist()) for image in more.train.images}
    assert all(bytes(image.flatten().tolist()) in rows for image in few.train.images)
    assert len(more.train.labels.unique()) == 10
    assert len(open_data(DataOptions(train_samples=10**6)).train) == 1437
    for split, count in (("train", 5), ("val", 2), ("test", 5)):
        make(tmp_path / split, count=count)
    found = open_data(DataOptions(name=str(tmp_path), test_samples=6))  # those kept for the end are evaluated too
    assert (len(found.train), len(found.test), len(found.held_out)) == (10, 4, 6)


def tensors(count=20, dtype=torch.uint8, classes=4):
    images = torch.arange(count * 3 * 5 * 5).view(count, 3, 5, 5).remainder(251).to(dtype)
    return TensorDataset(images, torch.arange(count) % classes)


def labelled(*labels):
    return TensorDataset(torch.zeros(len(labels), 1), torch.tensor(labels))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def test_bytes_in_tensors_go_to_memory():
    splits = wrap_data_sets(tensors(), tensors(8), PLAIN, tensors(5, classes=1))
    assert splits.held_out.labels.tolist() == [0] * 5  # which may have one class
    assert isinstance(splits.train, ImagesInMemory)
    assert splits.classes == ("0", "1", "2", "3")
    assert (splits.pixels.size, splits.pixels.channels, splits.pixels.augment) == (5, 3, "none")
    assert splits.description.startswith("your TensorDataset: 20 + 8 pictures; 5 more of the held-out set")
    narrow = TensorDataset(tensors().tensors[0][..., :2], splits.train.labels)
    found = wrap_data_sets(narrow, narrow, PLAIN).pixels
    values = narrow.tensors[0].transpose(0, 1).flatten(1).double() / 255
    assert found.mean == pytest.approx(values.mean(1).tolist(), abs=1e-4)
    assert found.std == pytest.approx(values.std(1, correction=0).tolist(), abs=1e-4)


def test_without_a_test_set_a_fixed_share_is_kept_and_labels_may_be_a_column():
    for dtype in (torch.uint8, torch.float32):
        images, labels = tensors(dtype=dtype).tensors
        column = Subset(TensorDataset(images, labels.view(-1, 1)), range(20))
        splits, again = (
            wrap_data_sets(data, None, DataOptions(validation=0.25)) for data in (column, tensors(dtype=dtype))
        )
        assert (len(splits.train), len(splits.test)) == (15, 5)
        assert torch.equal(splits.test.labels, again.test.labels)
    assert isinstance(splits.train, UserSamples)
    assert splits.train.labels.shape == (15,)
    batch = next(open_loader(splits.train, splits.pixels, train=True, seed=0).batches(0, [torch.arange(15)]))
    rest = next(open_loader(splits.test, splits.pixels, train=True, seed=0).batches(0, [torch.arange(5)]))
    found = torch.cat([batch.images, rest.images]).flatten(1).sum(1).sort().values
    assert torch.equal(found, tensors(dtype=torch.float32).tensors[0].flatten(1).sum(1).sort().values)


class Pictures:
    """A data set without labels of its own, and with classes where asked."""

    def __init__(self, size=(9, 7), mode="RGB", **attributes):
        values = numpy.arange(size[0] * size[1] * 3, dtype=numpy.uint8).reshape(size[1], size[0], 3)
        self.image = Image.fromarray(values).convert(mode)
        vars(self).update(attributes)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index >= 12:
            raise IndexError
        return self.image, index % 3


ABC = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("data", "classes"),
    [
        (Pictures(), "012"),
        (Pictures(classes=ABC), "abc"),
        (Subset(Pictures(classes=ABC), [1, 2, 3]), "abc"),
        (Pictures(num_classes=4), "0123"),
    ],
)
def test_classes_and_the_size_of_pictures_are_found(data, classes):
    assert wrap_data_sets(data, None, PLAIN).classes == tuple(classes)
    for shape, mode, size in (((9, 9), "L", 9), ((9, 7), "RGB", 9), ((90, 70), "RGB", 224)):
        pixels = wrap_data_sets(Pictures(shape, mode), None, PLAIN).pixels
        assert (pixels.size, pixels.channels) == (size, len(mode))


def served(source):
    loader = open_loader(source, wrap_data_sets(Pictures(), None, PLAIN).pixels, train=False, seed=0, classes=3)
    return next(loader.batches(0, [torch.arange(len(source))])).labels.tolist()


@pytest.mark.parametrize("known", [True, False])
def test_the_classes_of_an_evaluated_set_follow_their_names(known):
    def of(classes, **more):
        labels = [index % 3 for index in range(12)]
        return Pictures(classes=classes, **({"targets": labels} if known else {}), **more)

    train = of(["ant", "bee", "cow"])
    for test, expected in [
        (of(["bee", "cow", "ant"]), [1, 2, 0]),
        (Subset(of(["cow", "bee", "ant"]), [0, 1, 2]), [2, 1, 0]),
        (ConcatDataset([of(["bee", "cow", "ant"])] * 2), [1, 2, 0]),
        (Subset(of(["cow", "ant"]), [0, 1, 3]), [2, 0, 2]),
        (Subset(of(["cow"]), [0, 3, 6]), [2, 2, 2]),
        (of(["0", "1", "2"]), [0, 1, 2]),
        (of(["bee", "cow", "ant"], target_transform=abs), [0, 1, 2]),
    ]:
        splits = wrap_data_sets(train, test, PLAIN, test)
        assert splits.classes == ("ant", "bee", "cow")
        for source in (splits.test, splits.held_out):
            assert served(source)[:3] == expected
            assert source.labels is None or source.labels.tolist()[:3] == expected
    with pytest.raises(UserError, match='the run has no class "bee", "cow"'):
        map_labels_by_name(splits.test, ("bee", "cow"), ("0", "1", "2"), "")
    for test, held_out in [(of(["bee", "cow", "dog"]), None), (None, of(["bee", "cow", "dog"]))]:
        with pytest.raises(UserError, match='the run has no class "dog"') as raised:
            wrap_data_sets(train, test, PLAIN, held_out)
        assert raised.value.where == ("the test set" if test else "the held-out set")
    with pytest.raises(UserError, match="the label of sample 2 is 2, but"):
        served(wrap_data_sets(train, of(["bee", "cow"]), PLAIN).test)


def test_labels_are_known_without_reading():
    numbers = [0, 1, 2] * 4
    assert stored_labels(Pictures()) is None
    assert stored_labels(Pictures(targets=numbers)).tolist() == numbers
    assert stored_labels(Pictures(targets=numbers, target_transform=abs)) is None
    assert stored_labels(Pictures(labels=["a"] * 12)) is None
    assert stored_labels(Subset(Pictures(targets=torch.tensor(numbers)), [2, 0])).tolist() == [2, 0]
    both = ConcatDataset([tensors(3), Pictures(targets=numpy.array(numbers))])
    assert stored_labels(both).tolist() == [0, 1, 2, *numbers]


MADE = """
    import torch
    from torch.utils.data import TensorDataset
    from manyhands.data.open import open_data
    from manyhands.data.options import DataOptions

    def pair():
        data = TensorDataset(torch.zeros(6, 4), torch.arange(6) % 2)
        return data, None

    def splits():
        return open_data(DataOptions(name="synthetic:10x1x4x4x2"))

    def single():
        return 3
"""


def test_the_users_own_function(tmp_path):
    path = tmp_path / "made_for_tests.py"
    path.write_text(textwrap.dedent(MADE))
    pair, splits = (open_data(DataOptions(name=f"{path}:{word}")) for word in ("pair", "splits"))
    assert (len(pair.train), len(splits.train)) == (5, 10)
    assert pair.description == f"{path}:pair: 5 + 1 pictures"
    with pytest.raises(UserError, match="returned a int, not a pair"):
        open_data(DataOptions(name=f"{path}:single"))


def test_torchvision_s_data_sets(tmp_path):
    write_mnist(tmp_path / "MNIST" / "raw", (12, 4), suffix="")
    splits = open_data(DataOptions(name="torchvision:MNIST", dir=str(tmp_path), download=False))
    assert (len(splits.train), len(splits.test), len(splits.classes)) == (12, 4, 10)
    assert (splits.pixels.size, splits.pixels.channels) == (28, 1)
    assert splits.train.labels.tolist() == [*range(10), 0, 1]
    batch = next(open_loader(splits.train, splits.pixels, train=True, seed=0).batches(0, [torch.arange(3)]))
    assert batch.images.shape == (3, 1, 28, 28)
    with pytest.raises(UserError, match="torchvision's FashionMNIST can't be opened"):
        open_data(DataOptions(name="torchvision:FashionMNIST", dir=str(tmp_path), download=False))


OWN, OTHER = os.getuid(), os.getuid() + 1


@pytest.mark.parametrize(
    ("mode", "user", "group", "moved"),
    [
        (0o755, OWN, OTHER, False),
        (0o755, OTHER, OWN, True),
        (0o1777, 0, 0, False),
        (0o1777, OTHER, 0, True),
        (0o777, OWN, OWN, True),
        (0o775, OWN, OWN, False),
        (0o775, OWN, OTHER, True),
        (0o1775, OWN, OTHER, False),
    ],
)
def test_code_lies_where_nobody_else_can_write(tmp_path, monkeypatch, mode, user, group, moved):
    assert others_can_write(os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))) == moved
    cache, own = tmp_path / "cache", tmp_path / "own"
    monkeypatch.setenv("MANYHANDS_CACHE", str(cache))
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    for mode_of_parent, found in ((0o700, cache / "compiled"), (0o777, own / "manyhands" / "compiled")):
        cache.mkdir(exist_ok=True)
        cache.chmod(mode_of_parent)
        assert private_folder("compiled") == found


def test_the_real_mnist(real_data):
    splits = open_data(DataOptions(name="mnist", dir=str(real_data("mnist").parent), download=False))
    assert (len(splits.train), len(splits.test)) == (60_000, 10_000)
    assert splits.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert splits.test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    pixels = splits.train.images.float() / 255
    assert splits.pixels.mean == (round(float(pixels.mean()), 4),)
    assert splits.pixels.std == (round(float(pixels.std()), 4),)
