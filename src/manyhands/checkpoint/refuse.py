"""Why a checkpoint could not be saved, as errors for users."""

import errno
import shutil
from pathlib import Path

import torch

from manyhands.checkpoint.snapshot import Snapshot
from manyhands.core.errors import RunError

_MARGIN_BYTES = 64 * 1024
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class NotFiniteError(RunError):
    """A weight is NaN or infinite."""


class SaveError(RunError):
    """The disk is full or failing. Earlier checkpoints are untouched, so training may go on."""


def refuse_non_finite(snapshot: Snapshot) -> None:
    """Raises a RunError that names the first tensor of the network with a NaN or an infinity that was finite once."""
    for name, tensor in snapshot.model.items():
        if name in snapshot.endless or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = tensor.float() if tensor.element_size() == 1 else tensor
        if not bool(torch.isfinite(values).all()):
            count = int((~torch.isfinite(values)).sum())
            what = f"{name} has {count} of {tensor.numel()} values that are NaN or infinite; no checkpoint was saved"
            raise NotFiniteError(what, name, ("lower train.lr, clip gradients, or resume from an earlier checkpoint",))


def refuse_too_little_space(folder: Path, size_bytes: int) -> None:
    """Raises an OSError where a folder's disk has no room for so many bytes of tensors."""
    needed = size_bytes + _MARGIN_BYTES
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free")


def save_error(folder: Path, error: OSError) -> SaveError:
    """The error for users; says what the disk said."""
    text = error.strerror or str(error)
    if error.errno in _FULL:
        hints = (
            "free some space, or point --out at another disk",
            "earlier checkpoints are kept; training can continue",
        )
        return SaveError(f"the disk is full: {text}", str(folder), hints)
    return SaveError(f"writing failed: {text}", str(folder), ("earlier checkpoints are kept",))
