"""Random numbers and normalising: by parts, into memory that was used before, of which neither may be seen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.seeds import derive, mix
from manyhands.data.transforms import Normalise, Pixels, SampleRng, below, bits, mix_tensor, spread

PIXELS = Pixels(96, 3, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), "none")
WORDS = st.integers(-(2**63), 2**63 - 1)
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def pictures(seed, count=40):
    return torch.randint(0, 256, (count, 3, 96, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_picture_is_the_same_in_any_batch(dtype, layout):
    normalise = Normalise(PIXELS, torch.device("cpu"), dtype, layout)
    batch = pictures(0)
    together = normalise(batch)
    assert together.dtype == dtype
    assert together.is_contiguous(memory_format=layout)
    assert torch.equal(together, torch.cat([normalise(picture[None]) for picture in batch]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_still_read_stays_as_it_is(layout):
    normalise = Normalise(PIXELS, torch.device("cpu"), torch.float32, layout)
    weight = torch.ones(1, 3, 1, 1, requires_grad=True)
    loss = (normalise(pictures(0)) * weight).sum((0, 2, 3))  # only the graph still holds the batch
    kept = normalise(pictures(1))[3:5, 1:]
    shared = normalise(pictures(2)).numpy()
    wanted, shown = kept.clone(), shared.copy()
    for seed in range(3, 9):
        normalise(pictures(seed))
    fresh = Normalise(PIXELS, torch.device("cpu"), torch.float32, layout)
    loss.sum().backward()
    assert torch.allclose(weight.grad.flatten(), fresh(pictures(0)).sum((0, 2, 3)), rtol=1e-3)
    assert torch.equal(kept, wanted)
    assert (shared == shown).all()


def test_memory_that_nobody_reads_is_used_again():
    normalise = Normalise(PIXELS, torch.device("cpu"), torch.float32)
    assert len({normalise(pictures(seed)).data_ptr() for seed in range(9)}) <= 2


@given(st.lists(WORDS, min_size=1, max_size=20))
def test_tensors_are_mixed_as_numbers_are(values):
    mixed = mix_tensor(torch.tensor(values)).tolist()
    assert [value % 2**64 for value in mixed] == [mix(value % 2**64) for value in values]


@given(
    st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.lists(st.integers(0, 2**40), min_size=1), st.integers(0, 99)
)
def test_draws_are_the_same_for_one_and_for_many(seed, epoch, samples, draw):
    key = derive(seed, "augment", epoch)
    many = bits(mix_tensor(torch.tensor(samples) ^ key), draw)
    assert many.tolist() == [SampleRng(key, sample).bits(draw) for sample in samples]
    assert below(many, 9).tolist() == [SampleRng(key, sample).below(draw, 9) for sample in samples]


def test_draws_cover_their_range_evenly():
    drawn = below(bits(mix_tensor(torch.arange(90_000) ^ derive(0, "augment", 0)), 1), 9)
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
