from dataclasses import replace
from itertools import count, islice, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from manyhands.data.loading import open_loader
from manyhands.data.pictures import prepare, to_tensor
from manyhands.data.samples import as_picture
from manyhands.data.splits import ImagesInMemory
from manyhands.data.transforms import Pixels, epoch_rng, padded

COUNT = 40
AUGMENTS = ("none", "crop", "crop-flip", "resized-crop-flip")


def source(channels=3, size=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (COUNT, channels, size, size), dtype=torch.uint8, generator=generator)
    return ImagesInMemory(images, torch.arange(COUNT) % 7)


def pixels(augment="crop-flip", channels=3, size=12):
    return Pixels(size, channels, (0.5, 0.4, 0.3)[:channels], (0.2, 0.3, 0.4)[:channels], augment)


def loader(augment="crop-flip", train=True, seed=3, **options):
    return open_loader(source(), pixels(augment), train=train, seed=seed, **options)


REQUESTS = st.lists(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=9), min_size=1, max_size=12)


@given(REQUESTS, st.sampled_from(AUGMENTS))
@settings(max_examples=60, deadline=None)
def test_a_sample_is_the_same_in_any_company(requests, augment):
    """Bit for bit, whatever the batch, its size and its order."""
    serve = loader(augment)
    alone = [batch.images[0] for batch in serve.batches(2, torch.arange(COUNT).split(1))]
    batches = list(serve.batches(2, map(torch.tensor, requests)))
    assert [batch.samples.tolist() for batch in batches] == requests
    for batch, request in zip(batches, requests, strict=True):
        assert torch.equal(batch.images, torch.stack([alone[sample] for sample in request]))
        assert batch.labels.tolist() == [sample % 7 for sample in request]


@pytest.mark.parametrize("augment", AUGMENTS)
def test_epochs_and_seeds_differ_where_there_is_chance(augment):
    def images(seed, epoch):
        return next(loader(augment, seed=seed).batches(epoch, [torch.arange(COUNT)])).images

    assert torch.equal(images(1, 1), images(1, 1))
    assert torch.equal(images(1, 1), images(1, 2)) == (augment == "none")
    assert torch.equal(images(1, 1), images(2, 1)) == (augment == "none")


def naive(data, wanted, train, epoch=0, seed=3):
    """One picture at a time, through Pillow, normalised with plain arithmetic."""
    images = []
    for sample, image in enumerate(data.images):
        made = prepare(to_tensor(as_picture(image)), wanted, epoch_rng(seed, epoch, sample) if train else None)
        mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (wanted.mean, wanted.std))
        images.append((made.double() / 255 - mean) / std)
    return torch.stack(images)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", ["none", "crop", "crop-flip"])
def test_it_agrees_with_one_picture_at_a_time(augment, channels, train):
    data, wanted = source(channels), pixels(augment, channels)
    serve = open_loader(data, wanted, train=train, seed=3, dtype=torch.float64)
    found = torch.cat([batch.images for batch in serve.batches(0, torch.arange(COUNT).split(7))])
    assert torch.allclose(found, naive(data, wanted, train), rtol=0, atol=1e-12)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("augment", ["crop", "crop-flip"])
def test_turns_and_reflected_edges_agree_with_one_picture_at_a_time(augment, epoch):
    data, wanted = source(), replace(pixels(augment), shift=3, reflects=True, alternates=True)
    serve = open_loader(data, wanted, train=True, seed=3, dtype=torch.float64)
    found = torch.cat([batch.images for batch in serve.batches(epoch, torch.arange(COUNT).split(7))])
    assert torch.allclose(found, naive(data, wanted, train=True, epoch=epoch), rtol=0, atol=1e-12)


def test_each_picture_is_mirrored_in_every_second_epoch_and_half_of_them_in_each():
    images = torch.arange(16, dtype=torch.uint8).expand(COUNT, 1, 16, 16).contiguous()
    wanted = Pixels(16, 1, (0.0,), (1 / 255,), "resized-crop-flip", alternates=True)
    turned = []
    for epoch in range(4):
        serve = open_loader(ImagesInMemory(images, torch.zeros(COUNT, dtype=torch.int64)), wanted, train=True, seed=1)
        left, right = (
            torch.cat([b.images for b in serve.batches(epoch, [torch.arange(COUNT)])]).mean(2)[:, 0, [0, 15]].T
        )
        turned.append(left > right)
    assert 0 < turned[0].sum() < COUNT
    assert all(torch.equal(one, ~other) for one, other in pairwise(turned))


def test_a_reflected_edge_is_that_of_torch():
    images = torch.randint(256, (3, 2, 9, 9), dtype=torch.uint8)
    wanted = functional.pad(images.float(), (4,) * 4, "reflect").to(torch.uint8)
    assert torch.equal(padded(images, 4, reflects=True), wanted)


@pytest.mark.parametrize(("augment", "train"), [("none", False), ("crop-flip", True), ("resized-crop-flip", True)])
@pytest.mark.parametrize("size", [9, 24])
def test_resizing_agrees_with_pillow_to_a_level(augment, train, size):
    data, wanted = source(), pixels(augment, size=size)
    found = next(open_loader(data, wanted, train=train, seed=3).batches(0, [torch.arange(COUNT)])).images
    level = 1 / 255 / min(wanted.std)
    assert found.shape == (COUNT, 3, size, size)
    assert (found - naive(data, wanted, train)).abs().max() <= 1.01 * level


@pytest.mark.parametrize("augment", ["none", "crop-flip", "resized-crop-flip"])
@pytest.mark.parametrize("train", [True, False])
def test_resizing_at_once_or_by_the_batch_is_one(augment, train, monkeypatch):
    data, wanted = source(), pixels(augment, size=17)
    at_once = next(open_loader(data, wanted, train=train, seed=0).batches(0, [torch.arange(COUNT)])).images
    monkeypatch.setattr("manyhands.data.loading._RESIZED_BYTES", 0)
    by_batch = open_loader(data, wanted, train=train, seed=0).batches(0, torch.arange(COUNT).split(3))
    assert torch.equal(at_once, torch.cat([batch.images for batch in by_batch]))


def test_channels_are_repeated_or_become_luma():
    grey = next(open_loader(source(1), pixels("none"), train=False, seed=0).batches(0, [torch.arange(4)])).images
    back = grey * torch.tensor((0.2, 0.3, 0.4)).view(3, 1, 1) + torch.tensor((0.5, 0.4, 0.3)).view(3, 1, 1)
    assert torch.allclose(back, source(1).images[:4].expand(-1, 3, -1, -1) / 255, atol=1e-6)
    data = source(3)
    luma = next(open_loader(data, pixels("none", 1), train=False, seed=0).batches(0, [torch.arange(4)])).images
    wanted = torch.stack([torch.tensor(list(as_picture(x).convert("L").tobytes())) for x in data.images[:4]])
    assert ((luma.view(4, -1) * 0.2 + 0.5) * 255 - wanted).abs().max() < 1.01


def test_requests_are_read_lazily():
    taken = []

    def endless():
        for number in count():
            taken.append(number)
            yield torch.tensor([number % COUNT])

    batches = list(islice(loader().batches(0, endless()), 3))
    assert [int(batch.samples) for batch in batches] == [0, 1, 2]
    assert len(taken) <= 130


def test_types_and_layout():
    serve = loader(dtype=torch.bfloat16, channels_last=True)
    batch = next(serve.batches(0, torch.arange(COUNT).split(4)))
    assert batch.images.dtype == torch.bfloat16
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.dtype == batch.samples.dtype == torch.int64


def test_batches_don_t_share_memory_with_the_set():
    data = source()
    before = data.images.clone()
    serve = open_loader(data, pixels("none"), train=False, seed=0)
    for batch in serve.batches(0, torch.arange(COUNT).split(7)):
        batch.images.fill_(0)
        batch.labels.fill_(0)
    assert torch.equal(data.images, before)
    assert data.labels.tolist() == [sample % 7 for sample in range(COUNT)]


def test_no_requests_no_batches():
    assert list(loader().batches(0, [])) == []
