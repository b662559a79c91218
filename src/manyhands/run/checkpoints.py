"""Looks into checkpoints and changes how they are cut, without the network's code."""

from pathlib import Path
from typing import Any

from manyhands.checkpoint.reshard import describe, is_single_file, merge, read_plan, refuse_existing, reshard
from manyhands.checkpoint.source import Source, open_checkpoint
from manyhands.run.inspect import resolve_checkpoint


def describe_checkpoint(reference: Path, *, which: str) -> dict[str, Any]:
    """What a checkpoint holds: format, step, mesh, and each tensor with its shape, type, cut and size.

    Args:
        reference: a run folder, a checkpoint, or a .pth.tar, .pth, .pt or .safetensors file.
        which: "best" or "last", for a run folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    return describe(_open(reference, which))


def merge_checkpoint(reference: Path, target: Path, *, which: str) -> tuple[str, ...]:
    """Writes a checkpoint whole: a new folder, or the weights alone as a .safetensors, .pth or .pt file.

    Returns:
        What was left out, as sentences.

    Raises:
        ManyhandsError: the target is there already, the source is damaged, or the disk is full.
    """
    refuse_existing(target)
    source = _open(reference, which)
    merge(source, target)
    if source.optimizer is not None and is_single_file(target):
        return (*source.notes, "the optimizer's state is left out: the file holds the weights alone")
    return source.notes


def reshard_checkpoint(reference: Path, target: Path, *, plan: Path, which: str) -> tuple[str, ...]:
    """Writes a new checkpoint folder that is cut as a plan says.

    Returns:
        What was left out, as sentences.

    Raises:
        ManyhandsError: the target is there already, the plan doesn't fit, the source is damaged, or the disk is full.
    """
    refuse_existing(target)
    cut = read_plan(plan)
    source = _open(reference, which)
    reshard(source, target, cut)
    return source.notes


def _open(reference: Path, which: str) -> Source:
    path = resolve_checkpoint(reference, which)
    return open_checkpoint(path, verified=path.is_dir())
