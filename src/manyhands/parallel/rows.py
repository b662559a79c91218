"""Which rows of a BatchNorm's input belong to which sample, found by trial.

Usually a row is a sample. Some networks flatten tokens into the first dimension (timm's LeViT, [samples x tokens, C]),
and there the groups are known if each sample's rows follow the sample's before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.parallel.norm import GroupedNorm

Inputs = dict[GroupedNorm, list[Tensor]]


@contextmanager
def watching(layers: Sequence[GroupedNorm]) -> Iterator[Inputs]:
    """Gathers what the layers are given in this context."""
    seen: Inputs = {}

    def look(layer: nn.Module, inputs: Any) -> None:
        if isinstance(layer, GroupedNorm):
            seen.setdefault(layer, []).append(inputs[0].detach())

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def find_rows(model: nn.Module, layers: Sequence[GroupedNorm], images: Tensor) -> None:
    """Sets `rows_per_sample` of the layers by trial on two samples or more; the network is left in training."""
    if not layers:
        return
    model.eval()
    with torch.no_grad(), watching(layers) as seen:
        model(images)
    set_rows_per_sample(model.train(), seen, images)


def set_rows_per_sample(model: nn.Module, seen: Inputs, images: Tensor) -> None:
    """Sets `rows_per_sample` of the layers of which an input had another number of rows than there were samples.

    `seen` is what they were given when the network, in training, was run on the images [n, ...]. Where there are such
    layers it runs twice in evaluation; it is left in training.
    """
    count = len(images)
    odd = [layer for layer, inputs in seen.items() if any(one.shape[0] != count for one in inputs)]
    if not odd:
        return
    other = images.clone()
    other[-1] = torch.rand_like(other[-1])
    model.eval()
    try:
        with torch.no_grad():
            with watching(odd) as before:
                model(images)
            with watching(odd) as after:
                model(other)
    finally:
        model.train()
    for layer in odd:
        found = {
            _rows(one, two, count) for one, two in zip(before.get(layer, []), after.get(layer, []), strict=True)
        } or {0}
        layer.rows_per_sample = found.pop() if len(found) == 1 else 0


def _rows(one: Tensor, two: Tensor, count: int) -> int:
    """Rows of each sample, from a layer's inputs [n, ...] before and after the last sample was changed; 0: unknown."""
    if count < 2 or one.shape != two.shape or one.shape[0] % count:
        return 0
    each = one.shape[0] // count
    changed = (one != two).flatten(1).any(1)
    return each if changed[-each:].all() and not changed[:-each].any() else 0
