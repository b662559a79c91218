"""What a network's forward pass may draw from: seeded, so that a resumed run draws the same; and noticed."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

# Whose layers draw from torch's generators alone.
_KNOWN = ("torch.nn.modules.", "torch.nn.parallel.", "manyhands.")


def uses_torch_rng_alone(model: nn.Module) -> bool:
    """True where nothing of the user's takes part in a forward pass: layers that are torch's or ours, without hooks."""
    return all(map(_is_known, model.modules()))


def _is_known(layer: nn.Module) -> bool:
    own = vars(layer)
    changed = "forward" in own or any(own[name] for name in own if name.endswith("_hooks"))
    return not changed and all(kind.__module__.startswith(_KNOWN) for kind in type(layer).__mro__[:-1])


def seed_generators(seed: int, device: str, *, torch_alone: bool = False) -> None:
    """Seeds torch's generators, and unless nobody draws from them random's and numpy's; `device` is such as cpu."""
    if device == "cpu":
        # torch.manual_seed would also note a whole traceback for each kind of accelerator that isn't in use.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    if not torch_alone:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def drawing(seed: int, device: str) -> Iterator[Callable[[], bool]]:
    """Has what is drawn in this context follow from `seed`, and gives the generators back as they were.

    Yields:
        A function that says whether anything has been drawn.
    """
    before = _states(device)
    seed_generators(seed, device)
    seeded = _states(device)
    try:
        yield lambda: _differ(_states(device), seeded)
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        if device != "cpu":
            torch.get_device_module(device).set_rng_state(before[3])


def _states(device: str) -> list[Any]:
    own = [] if device == "cpu" else [torch.get_device_module(device).get_rng_state()]
    return [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False), *own]


def _differ(one: list[Any], other: list[Any]) -> bool:
    tensors = [torch.equal(a, b) for a, b in zip(one, other, strict=True) if isinstance(a, torch.Tensor)]
    numpy_states = [state[2]["state"] for state in (one, other)]
    same = numpy_states[0]["pos"] == numpy_states[1]["pos"] and np.array_equal(*(s["key"] for s in numpy_states))
    return not (all(tensors) and one[1] == other[1] and same)
