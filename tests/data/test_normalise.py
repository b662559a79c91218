"""Large batches are normalised by parts, into memory that was used before: neither may be seen."""

import pytest
import torch

from manyhands.data.transforms import Normalise, Pixels

PIXELS = Pixels(96, 3, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), "none")
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
