"""Concatenation. Pieces of its parts are no piece of the whole, so channels are put together first."""

from typing import Any

import torch

from manyhands.parallel.graph import Op, whole_or_batch

KIND = "concat"
TARGETS: set[Any] = {torch.cat, torch.concat, torch.stack}


def matches(op: Op) -> bool:
    return op.node is not None and op.node.target in TARGETS


def describe(op: Op, inputs: list[Op]) -> None:
    """n, r."""
    op.letters = whole_or_batch(op, inputs)
    op.feature = inputs[0].feature
