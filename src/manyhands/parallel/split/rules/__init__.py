"""Sharding rules of ops.

A rule's `describe` sets `letters`, `feature` and `views` of the ops that the rule matches. `local(op, letters, grid)`
returns a module that computes the op on this process's shards, or None if the op works on shards unchanged.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.split.graph import Op, whole_or_batch

Describe = Callable[[Op, list[Op]], None]
Local = Callable[[Op, tuple[str, ...], Grid], nn.Module | None]


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one kind of op."""

    kind: str
    matches: Callable[[Op], bool]
    describe: Describe
    local: Local | None = None


def _describe_opaque(op: Op, inputs: list[Op]) -> None:
    op.letters = whole_or_batch(op, inputs)


OPAQUE = Rule(Op.kind, lambda _: True, _describe_opaque)  # for ops that no rule matches
RULES: list[Rule] = []


def rule(kind: str, matches: Callable[[Op], bool], local: Local | None = None) -> Callable[[Describe], Describe]:
    """Registers the decorated function as the sharding rule of the ops that `matches` accepts."""

    def register(describe: Describe) -> Describe:
        RULES.append(Rule(kind, matches, describe, local))
        return describe

    return register
