"""A second copy of each checkpoint, where machines don't share a disk: written there from what is there anyway."""

import platform
import secrets

from manyhands.core.folder import NOWHERE, RunFolder
from manyhands.core.journal import Journal
from manyhands.core.world import World
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.plain import broadcast_plain, gather_plain


def writers_of(folder: RunFolder, world: World, network: ParallelNetwork) -> tuple[int, ...]:
    """The ranks that write checkpoints, equal on all processes; a collective.

    Rank 0, and where each process holds the whole network the first one of a machine that doesn't see rank 0's disk.
    """
    held_whole = network.replicated and network.runs_alone and not network.layouts
    if world.local_size == world.size or not held_whole or folder is NOWHERE:
        return (0,)
    mark = folder.ranks / f".disk-{broadcast_plain(secrets.token_hex(8), world)}"
    if world.is_main:
        mark.touch()
    gather_plain(None, world)
    apart = world.local_rank == 0 and folder.ranks.is_dir() and not mark.exists()
    hosts = gather_plain(platform.node() if apart else "", world)
    if world.is_main:
        mark.unlink()
    other = next((rank for rank, host in enumerate(hosts) if host), None)
    if other is None:
        return (0,)
    told = f"each checkpoint is written on {platform.node()} and on {hosts[other]}, which don't share a disk"
    Journal(folder, world.rank).event("note", told)
    return (0, other)
