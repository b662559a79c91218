"""Pictures in memory: a sample doesn't depend on the batch it is in, and pixels are those of one picture at a time."""

from dataclasses import replace
from itertools import count, islice, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from manyhands.core.seeds import derive_seed
from manyhands.data.loading import open_loader
from manyhands.data.pictures import prepare_pixels, to_tensor
from manyhands.data.samples import to_pil_image
from manyhands.data.splits import ImagesInMemory
from manyhands.data.transforms import Normalize, Pixels, SampleRng, bits, mix_bits, pad, sample_rng, scaled, spread

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


def images_of(data, wanted, train=True, epoch=0, seed=3, size=COUNT, **options):
    """All pictures of an epoch, in batches of one size."""
    serve = open_loader(data, wanted, train=train, seed=seed, **options)
    return torch.cat([batch.images for batch in serve.batches(epoch, torch.arange(COUNT).split(size))])


REQUESTS = st.lists(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=9), min_size=1, max_size=12)


@given(REQUESTS, st.sampled_from(AUGMENTS))
@settings(max_examples=60, deadline=None)
def test_a_sample_is_the_same_in_any_company(requests, augment):
    serve = loader(augment)
    alone = [batch.images[0] for batch in serve.batches(2, torch.arange(COUNT).split(1))]
    batches = list(serve.batches(2, map(torch.tensor, requests)))
    assert [batch.samples.tolist() for batch in batches] == requests
    for batch, request in zip(batches, requests, strict=True):
        assert torch.equal(batch.images, torch.stack([alone[sample] for sample in request]))
        assert batch.labels.tolist() == [sample % 7 for sample in request]


@pytest.mark.parametrize("augment", AUGMENTS)
def test_epochs_and_seeds_differ_where_there_is_chance(augment):
    first, again, later, other = (
        images_of(source(), pixels(augment), seed=seed, epoch=epoch) for seed, epoch in ((1, 1), (1, 1), (1, 2), (2, 1))
    )
    assert torch.equal(first, again)
    assert torch.equal(first, later) == torch.equal(first, other) == (augment == "none")


def naive(data, wanted, train, epoch=0, seed=3):
    """One picture at a time, through Pillow, normalized with plain arithmetic."""
    images = []
    for sample, image in enumerate(data.images):
        made = prepare_pixels(
            to_tensor(to_pil_image(image)), wanted, sample_rng(seed, epoch, sample) if train else None
        )
        mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (wanted.mean, wanted.std))
        images.append((made.double() / 255 - mean) / std)
    return torch.stack(images)


TURNED = {"shift": 3, "reflects": True, "alternates": True}


@pytest.mark.parametrize(
    ("augment", "more", "epochs", "channels"),
    [
        *[(augment, {}, (0,), channels) for augment in ("none", "crop", "crop-flip") for channels in (1, 3)],
        *[(augment, TURNED, (0, 1), 3) for augment in ("crop", "crop-flip")],
    ],
)
def test_it_agrees_with_one_picture_at_a_time(augment, more, epochs, channels):
    data, wanted = source(channels), replace(pixels(augment, channels), **more)
    for train, epoch in [(False, 0), *[(True, epoch) for epoch in epochs]]:
        found = images_of(data, wanted, train, epoch, size=7, dtype=torch.float64)
        assert torch.allclose(found, naive(data, wanted, train, epoch), rtol=0, atol=1e-12)


def test_each_picture_is_mirrored_in_every_second_epoch_and_half_of_them_in_each():
    images = torch.arange(16, dtype=torch.uint8).expand(COUNT, 1, 16, 16).contiguous()
    wanted = Pixels(16, 1, (0.0,), (1 / 255,), "resized-crop-flip", alternates=True)
    data, turned = ImagesInMemory(images, torch.zeros(COUNT, dtype=torch.int64)), []
    for epoch in range(4):
        left, right = images_of(data, wanted, epoch=epoch, seed=1).mean(2)[:, 0, [0, 15]].T
        turned.append(left > right)
    assert 0 < turned[0].sum() < COUNT
    assert all(torch.equal(one, ~other) for one, other in pairwise(turned))


def test_a_reflected_edge_is_that_of_torch():
    images = torch.randint(256, (3, 2, 9, 9), dtype=torch.uint8)
    wanted = functional.pad(images.float(), (4,) * 4, "reflect").to(torch.uint8)
    assert torch.equal(pad(images, 4, reflects=True), wanted)


@pytest.mark.parametrize("size", [9, 17, 24])
@pytest.mark.parametrize(
    ("augment", "train"),
    [(augment, train) for augment in ("none", "crop-flip", "resized-crop-flip") for train in (True, False)],
)
def test_resizing_agrees_with_pillow_to_a_level_at_once_or_by_the_batch(augment, train, size, monkeypatch):
    data, wanted = source(), pixels(augment, size=size)
    found = images_of(data, wanted, train)
    assert found.shape == (COUNT, 3, size, size)
    assert (found - naive(data, wanted, train)).abs().max() <= 1.01 / 255 / min(wanted.std)
    monkeypatch.setattr("manyhands.data.loading._RESIZED_BYTES", 0)
    assert torch.equal(found, images_of(data, wanted, train, size=3))


def test_channels_are_repeated_or_become_luma():
    grey = images_of(source(1), pixels("none"), train=False)
    back = grey * torch.tensor((0.2, 0.3, 0.4)).view(3, 1, 1) + torch.tensor((0.5, 0.4, 0.3)).view(3, 1, 1)
    assert torch.allclose(back, source(1).images.expand(-1, 3, -1, -1) / 255, atol=1e-6)
    luma = images_of(source(3), pixels("none", 1), train=False)
    wanted = torch.stack([torch.tensor(list(to_pil_image(one).convert("L").tobytes())) for one in source(3).images])
    assert ((luma.view(COUNT, -1) * 0.2 + 0.5) * 255 - wanted).abs().max() < 1.01


def test_requests_are_read_lazily_and_none_give_no_batches():
    taken = []

    def endless():
        for number in count():
            taken.append(number)
            yield torch.tensor([number % COUNT])

    served = [*islice(loader(dtype=torch.bfloat16, channels_last=True).batches(0, endless()), 3)]
    assert [int(batch.samples) for batch in served] == [0, 1, 2]
    assert served[0].images.dtype == torch.bfloat16
    assert served[0].images.is_contiguous(memory_format=torch.channels_last)
    assert len(taken) <= 130
    assert list(loader().batches(0, [])) == []


def test_batches_don_t_share_memory_with_the_set():
    data = source()
    for batch in open_loader(data, pixels("none"), train=False, seed=0).batches(0, torch.arange(COUNT).split(7)):
        batch.images.fill_(0)
        batch.labels.fill_(0)
    assert torch.equal(data.images, source().images)
    assert torch.equal(data.labels, source().labels)


LARGE = Pixels(96, 3, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), "none")
LAYOUTS = [torch.contiguous_format, torch.channels_last]


# Normalizing reuses memory, which nobody may see.
def pictures(seed, count=40):
    return torch.randint(0, 256, (count, 3, 96, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_picture_is_the_same_in_any_batch(dtype, layout):
    normalize = Normalize(LARGE, torch.device("cpu"), dtype, layout)
    batch = pictures(0)
    together = normalize(batch)
    assert together.dtype == dtype
    assert together.is_contiguous(memory_format=layout)
    assert torch.equal(together, torch.cat([normalize(picture[None]) for picture in batch]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_still_read_stays_as_it_is(layout):
    normalize = Normalize(LARGE, torch.device("cpu"), torch.float32, layout)
    weight = torch.ones(1, 3, 1, 1, requires_grad=True)
    loss = (normalize(pictures(0)) * weight).sum((0, 2, 3))  # only the graph still holds the batch
    kept = normalize(pictures(1))[3:5, 1:]
    shared = normalize(pictures(2)).numpy()
    wanted, shown = kept.clone(), shared.copy()
    for seed in range(3, 9):
        normalize(pictures(seed))
    fresh = Normalize(LARGE, torch.device("cpu"), torch.float32, layout)
    loss.sum().backward()
    assert torch.allclose(weight.grad.flatten(), fresh(pictures(0)).sum((0, 2, 3)), rtol=1e-3)
    assert torch.equal(kept, wanted)
    assert (shared == shown).all()


def test_memory_that_nobody_reads_is_used_again():
    normalize = Normalize(LARGE, torch.device("cpu"), torch.float32)
    assert len({normalize(pictures(seed)).data_ptr() for seed in range(9)}) <= 2


@given(
    st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.lists(st.integers(0, 2**40), min_size=1), st.integers(0, 99)
)
def test_draws_are_the_same_for_one_and_for_many(seed, epoch, samples, draw):
    key = derive_seed(seed, "augment", epoch)
    many = bits(mix_bits(torch.tensor(samples) ^ key), draw)
    assert many.tolist() == [SampleRng(key, sample).bits(draw) for sample in samples]
    assert scaled(many, 9).tolist() == [SampleRng(key, sample).below(draw, 9) for sample in samples]


def test_draws_cover_their_range_evenly():
    drawn = scaled(bits(mix_bits(torch.arange(90_000) ^ derive_seed(0, "augment", 0)), 1), 9)
    assert torch.bincount(drawn, minlength=9).sub(10_000).abs().max() < 500
    uniform = [SampleRng(5, sample).uniform(2) for sample in range(2000)]
    assert min(uniform) >= 0
    assert max(uniform) < 1
    assert abs(sum(uniform) / 2000 - 0.5) < 0.03


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300))
def test_a_smaller_choice_is_part_of_a_larger_one(length, first, second):
    small, large = (spread(count, length).tolist() for count in sorted((first, second)))
    assert set(small) <= set(large) <= set(range(length))
    assert len(large) == min(length, max(first, second))
    assert large == sorted(set(large))
