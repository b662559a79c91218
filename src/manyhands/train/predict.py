"""What is on pictures, by a trained network, over any number of processes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.data.decode import CorruptImageError
from manyhands.models.outputs import main_and_auxiliary
from manyhands.parallel.plain import gather_plain
from manyhands.train.data_setup import name_outputs
from manyhands.train.trained import Trained

Guesses = list[tuple[str, float]]
# Whole blocks are dealt out, so that a picture is computed in the same company at any number of processes.
BLOCK = 32


def guess(trained: Trained, pictures: Sequence[Any], most: int = 5, *, skip: bool = False) -> Iterator[Guesses | str]:
    """The most likely classes of each picture, with their probabilities, in the order of the pictures.

    With `skip`, a picture that can't be read gives a text that says why.

    Raises:
        UserError: a picture can't be read (without `skip`) or doesn't suit the network.
    """
    for start in range(0, len(pictures), BLOCK):
        yield from _block(trained, pictures[start : start + BLOCK], most, skip=skip)


def guess_together(trained: Trained, pictures: Sequence[Any], world: World) -> list[Guesses | str]:
    """The same with `skip`, shared out among the processes of a group; a collective. All get all."""
    starts = range(0, len(pictures), BLOCK)
    mine = [
        _block(trained, pictures[start : start + BLOCK], 5, skip=True) for start in starts[world.rank :: world.size]
    ]
    everybody = gather_plain(mine, world)
    blocks = [everybody[number % world.size][number // world.size] for number in range(len(starts))]
    return [
        one if isinstance(one, str) else [(name, share) for name, share in one] for block in blocks for one in block
    ]


def _block(trained: Trained, pictures: Sequence[Any], most: int, *, skip: bool) -> list[Guesses | str]:
    images: list[Tensor] = []
    unreadable: dict[int, str] = {}
    for number, picture in enumerate(pictures):
        try:
            images.append(trained.transform(picture))
        except CorruptImageError as error:
            if not skip:
                raise
            unreadable[number] = error.message
    if not images:
        return list(unreadable.values())
    with torch.inference_mode():
        shares = main_and_auxiliary(trained.network(_stack(images)))[0].float().softmax(1)
    names = name_outputs(trained.classes, shares.shape[1])
    top = shares.topk(min(most, shares.shape[1]), dim=1)
    found = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    guesses = ([(names[number], share) for share, number in zip(*both, strict=True)] for both in found)
    return [unreadable.get(number) or next(guesses) for number in range(len(pictures))]


def _stack(images: list[Tensor]) -> Tensor:
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
        raise UserError(f"the samples have different shapes: {shown}", "", ("pass samples of one shape per call",))
    return torch.stack(images)
