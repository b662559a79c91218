"""Everything else: whole, or a part of the samples where it keeps them apart."""

from manyhands.parallel.graph import Op, whole_or_batch

KIND = "opaque"


def matches(op: Op) -> bool:  # noqa: ARG001 - any op
    return True


def describe(op: Op, inputs: list[Op]) -> None:
    """n, r."""
    op.letters = whole_or_batch(op, inputs)
