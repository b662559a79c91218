"""Batch normalisation. Its statistics are those of the job's groups of samples (parallel/norm.py), whoever has them."""

from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.parallel.graph import Loop, Op, whole_or_batch

KIND = "batch_norm"
PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


def matches(op: Op) -> bool:
    """True for BatchNorm of any number of dimensions, SyncBatchNorm among them."""
    return isinstance(op.module, _BatchNorm)


def describe(op: Op, inputs: list[Op]) -> None:
    """n, c (channels), r."""
    op.feature = 1
    # Across its groups it keeps samples apart; within them the executor has the processes share statistics.
    op.batchwise = all(one.batchwise for one in inputs) and bool(op.extent.rows or not op.batched)
    op.letters = whole_or_batch(op, inputs)
    if op.module is not None and op.module.running_mean is None:
        op.letters["n"] = "without running statistics, evaluation mixes samples"
    channels = op.extent.dims[1]
    others = set(op.parameters()) - {*PER_CHANNEL, "num_batches_tracked"}
    if others:
        op.letters["c"] = f"the module has more parameters than BatchNorm ({', '.join(sorted(others))})"
        return
    op.letters["c"] = Loop((1,), 1, dict.fromkeys(PER_CHANNEL, 0), length=channels)
