"""Looks into checkpoints and changes how they are cut, without the network's code."""

from pathlib import Path
from typing import Any

from manyhands.checkpoint.describe import is_pickled, open_description
from manyhands.run.evaluate import resolve_checkpoint
from manyhands.run.load import load_worker


def describe_checkpoint(reference: Path, *, which: str) -> dict[str, Any]:
    """What a checkpoint holds: format, step, mesh, and each tensor with its shape, type, cut and size.

    Args:
        reference: a run folder, a checkpoint, or a .pth.tar, .pth, .pt or .safetensors file.
        which: "best" or "last", for a run folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = resolve_checkpoint(reference, which)
    if is_pickled(path):
        return load_worker("checkpoints").describe_file(path)
    return open_description(path, verified=path.is_dir()).as_plain()


def merge_checkpoint(reference: Path, target: Path, *, which: str) -> tuple[str, ...]:
    """Writes a checkpoint whole: a new folder, or the weights alone as a .safetensors, .pth or .pt file.

    Returns:
        What was left out, as sentences.

    Raises:
        ManyhandsError: the target is there already, the source is damaged, or the disk is full.
    """
    files = load_worker("checkpoints")
    files.refuse_existing(target)
    return files.merge_file(resolve_checkpoint(reference, which), target)


def reshard_checkpoint(reference: Path, target: Path, *, plan: Path, which: str) -> tuple[str, ...]:
    """Writes a new checkpoint folder that is cut as a plan says.

    Returns:
        What was left out, as sentences.

    Raises:
        ManyhandsError: the target is there already, the plan doesn't fit, the source is damaged, or the disk is full.
    """
    files = load_worker("checkpoints")
    files.refuse_existing(target)
    cut = files.read_network_layout(plan)
    return files.reshard_file(resolve_checkpoint(reference, which), target, cut)
