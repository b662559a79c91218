"""A second copy of each checkpoint, where machines don't share a disk: of what is there anyway, or is sent there."""

import platform
import secrets

from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.world import World
from manyhands.parallel.plain import broadcast_plain, gather_plain
from manyhands.train.journal import Journal


def writers_of(folder: RunFolder, world: World, *, in_pieces: bool) -> dict[int, range]:
    """The ranks that write checkpoints, each with those of its machine, equal on all processes; a collective.

    Rank 0, and the first one of a machine that doesn't see rank 0's disk.

    Args:
        folder: of the run.
        world: who takes part.
        in_pieces: each process writes its own piece, which needs a disk that all share.
    """
    if world.local_size == world.size or in_pieces or folder is NOWHERE:
        return {0: range(world.local_size)}
    mark = folder.ranks / f".disk-{broadcast_plain(secrets.token_hex(8), world)}"
    if world.is_main:
        mark.touch()
    gather_plain(None, world)
    apart = world.local_rank == 0 and folder.ranks.is_dir() and not mark.exists()
    machines = gather_plain([platform.node() if apart else "", world.local_size], world)
    if world.is_main:
        mark.unlink()
    writers = {0: range(machines[0][1])}
    for rank, (host, size) in enumerate(machines):
        if host:
            message = f"each checkpoint is saved on both {platform.node()} and {host}, because they don't share a disk"
            Journal(folder, world.rank).event("note", message)
            return {**writers, rank: range(rank, rank + size)}
    return writers
