"""Looking ahead changes no batch, no order and no error; what the copies themselves do needs a card (tests/gpu)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import TensorDataset

from manyhands.data.decode import CorruptImageError
from manyhands.data.loading import CopiesAhead, looking_ahead, open_loader
from manyhands.data.packed import PictureNames
from manyhands.data.splits import ImageFiles, ImagesInMemory, UserSamples
from manyhands.data.transforms import Pixels

PIXELS = Pixels(8, 3, (0.5,) * 3, (0.25,) * 3, "crop-flip")
REQUESTS = [[3, 1, 2], [0], [11, 3], [5, 4, 6, 7, 8]]


class PlantedError(Exception):
    pass


class Source:
    """So many items, then an end, or an error in the place of one; notes what was taken, and that it was closed."""

    def __init__(self, count, fails_at=None):
        self.count, self.fails_at = count, fails_at
        self.taken, self.closed, self.error = 0, False, PlantedError()

    def __iter__(self):
        try:
            for number in range(self.count):
                if number == self.fails_at:
                    raise self.error
                self.taken += 1
                yield number
        finally:
            self.closed = True


@given(st.integers(0, 12))
def test_all_come_in_order_and_one_is_begun_ahead(count):
    source = Source(count)
    given_out = []
    for begun in looking_ahead(source, lambda number: [number]):
        given_out += begun
        assert source.taken == min(count, len(given_out) + 1)
    assert given_out == list(range(count))


@given(st.integers(1, 12), st.data())
def test_an_error_comes_in_its_items_place(count, data):
    fails_at = data.draw(st.integers(0, count - 1))
    in_begin = data.draw(st.booleans())
    source = Source(count, None if in_begin else fails_at)

    def begin(number):
        if in_begin and number == fails_at:
            raise source.error
        return number

    served = looking_ahead(source, begin)
    assert [next(served) for _ in range(fails_at)] == list(range(fails_at))
    with pytest.raises(PlantedError) as caught:
        next(served)
    assert caught.value is source.error
    assert list(served) == []


@given(st.integers(1, 12), st.data())
def test_who_stops_early_ends_the_source(count, data):
    source = Source(count)
    served = looking_ahead(source, lambda number: number)
    for _ in range(data.draw(st.integers(1, count))):
        next(served)
    served.close()
    assert source.closed or source.taken == count


def test_on_a_processor_nothing_is_done():
    answers = [object()]
    assert CopiesAhead(torch.device("cpu"))(answers) is answers


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    paths = []
    for number, image in enumerate(images):
        paths.append(str(folder / f"{number}.png"))
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(paths[-1])
    (folder / "bad.jpg").write_bytes(b"\xff\xd8\xff")
    labels = torch.arange(12) % 5
    return {
        "memory": ImagesInMemory(images, labels),
        "files": ImageFiles(PictureNames.of(paths), labels),
        "own": UserSamples(TensorDataset(images.float(), labels)),
        "corrupt": ImageFiles(PictureNames.of([*paths, str(folder / "bad.jpg")]), torch.arange(13) % 5),
    }


def loaders(source, workers=0):
    """One as it is here, and one that looks ahead as with a card."""
    plain, ahead = (open_loader(source, PIXELS, train=True, seed=5, workers=workers) for _ in range(2))
    assert isinstance(ahead._ahead, CopiesAhead)
    ahead._ahead = lambda answers: looking_ahead(answers, lambda answer: answer)
    return plain, ahead


@pytest.mark.parametrize(("kind", "workers"), [("memory", 0), ("files", 0), ("files", 2), ("own", 0)])
def test_batches_are_what_they_are_without(sources, kind, workers):
    plain, ahead = loaders(sources[kind], workers)
    for epoch in (0, 1):
        found = [list(one.batches(epoch, map(torch.tensor, REQUESTS))) for one in (plain, ahead)]
        assert [batch.samples.tolist() for batch in found[1]] == REQUESTS
        for left, right in zip(*found, strict=True):
            assert torch.equal(left.images, right.images)
            assert torch.equal(left.labels, right.labels)
    plain.close()
    ahead.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_picture_is_told_of_at_its_own_batch(sources, workers):
    _, ahead = loaders(sources["corrupt"], workers)
    served = ahead.batches(0, [torch.tensor([1]), torch.tensor([2, 12]), torch.tensor([3])])
    assert next(served).samples.tolist() == [1]
    with pytest.raises(CorruptImageError):
        next(served)
    assert len(list(ahead.batches(0, map(torch.tensor, REQUESTS)))) == len(REQUESTS)
    ahead.close()
