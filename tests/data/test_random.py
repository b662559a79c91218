import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.seeds import derive, mix
from manyhands.data.transforms import SampleRng, below, bits, mix_tensor, spread

WORDS = st.integers(-(2**63), 2**63 - 1)


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
