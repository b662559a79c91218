"""Opens a checkpoint on several processes, each of which then reads what it needs. Every process calls this."""

from pathlib import Path

from manyhands.checkpoint.source import Source, open_checkpoint
from manyhands.checkpoint.together import Peers, together
from manyhands.checkpoint.verify import verify


def open_together(path: Path, peers: Peers) -> Source:
    """Opens a checkpoint that all processes see; a collective. The files are compared with the manifest once in all.

    Args:
        path: a checkpoint folder, whole or in pieces, or another tool's file.
        peers: the processes.

    Returns:
        The source: `snapshot(cut, rank)` reads this process's pieces of everything, `model.piece` those of one tensor.

    Raises:
        TornCheckpointError: a file is missing or not what was committed; on all processes.
        UserError: a process doesn't see it, or what is there is no checkpoint; on all processes.
    """
    opened: list[Source] = []
    # First all files, since a torn one is best named by the process that compares it.
    together(peers, lambda: None if path.is_file() else verify(path, every=peers.size, first=peers.rank))
    together(peers, lambda: opened.append(open_checkpoint(path, verified=True)))
    return opened[0]
