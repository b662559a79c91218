"""Reads checkpoints whole. A torn or altered one is refused; nothing that is read can run code."""

from pathlib import Path

from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.source import open_checkpoint


def load(path: Path) -> Snapshot:
    """Verifies a checkpoint folder, whole or in pieces, then reads all of it.

    Raises:
        TornCheckpointError: it doesn't verify.
        UserError: a newer version of manyhands wrote it.
    """
    return open_checkpoint(path).snapshot()
