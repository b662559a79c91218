"""Reads and writes the tensors of checkpoints for the command `checkpoint`."""

from pathlib import Path
from typing import Any

from manyhands.checkpoint.describe import NetworkLayout
from manyhands.checkpoint.read import open_checkpoint
from manyhands.checkpoint.reshard import (
    SAFETENSORS,
    is_single_file,
    merge,
    read_network_layout,
    refuse_existing,
    reshard,
)
from manyhands.checkpoint.snapshot import EXTRA_STATE

__all__ = ["describe_file", "merge_file", "read_network_layout", "refuse_existing", "reshard_file"]


def describe_file(path: Path) -> dict[str, Any]:
    """Describes a file that only torch can read, for `run.tasks`."""
    return open_checkpoint(path).as_plain()


def merge_file(path: Path, target: Path) -> tuple[str, ...]:
    """Writes an unsharded checkpoint; returns sentences about omitted content."""
    source = open_checkpoint(path, verified=path.is_dir())
    merge(source, target)
    notes = list(source.notes)
    if source.optimizer is not None and is_single_file(target):
        notes.append("the optimizer state is omitted: the file holds only weights")
    if EXTRA_STATE in source.state and target.name.endswith(SAFETENSORS):
        notes.append(
            "the modules' extra state is omitted: .safetensors files hold only tensors (do: choose a .pth file)"
        )
    return tuple(notes)


def reshard_file(path: Path, target: Path, network_layout: NetworkLayout) -> tuple[str, ...]:
    """Writes a checkpoint folder with another sharding; returns sentences about omitted content."""
    source = open_checkpoint(path, verified=path.is_dir(), wanted=network_layout.layouts)
    reshard(source, target, network_layout)
    return source.notes
