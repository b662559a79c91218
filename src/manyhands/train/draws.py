"""Random number generators of a forward pass: seeds them, so that a resumed run is the same, and detects their use."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_KNOWN = ("torch.nn.modules.", "torch.nn.parallel.", "manyhands.")  # layers that use only torch's generators


def uses_torch_rng_alone(model: nn.Module) -> bool:
    """True if a forward pass runs no user code: all layers are from torch or manyhands, without hooks."""
    return all(map(_is_known, model.modules()))


def _is_known(layer: nn.Module) -> bool:
    own = vars(layer)
    changed = "forward" in own or any(own[name] for name in own if name.endswith("_hooks"))
    return not changed and all(kind.__module__.startswith(_KNOWN) for kind in type(layer).__mro__[:-1])


def seed_generators(seed: int, device: str, *, torch_alone: bool = False) -> None:
    """Seeds the generators of torch and, if user code may use them, of random and numpy; `device` is a device type."""
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
    """Seeds the generators in this context and restores them afterwards.

    Yields:
        A function that returns True if a random number was drawn.
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
