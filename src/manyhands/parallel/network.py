"""A network that runs under some parallel mode, as the training step sees it."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import nn

NothingToHoldBack = contextlib.nullcontext


@dataclass
class ParallelNetwork:
    """What a mode's `apply` returns.

    Attributes:
        call: the module to call in training; its backward agrees on gradients where the mode does so.
        inner: the user's network under its own names, for evaluation and checkpoints.
        gradient_scale: what a process multiplies (its sum of losses / global batch) by, so that the gradients that
            come out are those of the mean loss over the global batch: the number of processes for modes that average.
        hold_back: a context in which backward adds up gradients without agreeing on them, for accumulation.
        collective_forward: True when every process must call forward equally often, also in evaluation.
        replicated: True when all processes hold equal parameters, so that they can be compared.
        sharded: True when parameters are held in pieces.
    """

    call: nn.Module
    inner: nn.Module
    gradient_scale: float = 1.0
    hold_back: Callable[[], AbstractContextManager[object]] = field(default=NothingToHoldBack)
    collective_forward: bool = False
    replicated: bool = True
    sharded: bool = False
