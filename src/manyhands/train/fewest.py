"""What a process will take once a run is as small as it may become: what it takes now, unless BatchNorm wants more."""

import os
import resource
import sys

import torch

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.pulse import PULSE_FILE
from manyhands.data.order import BatchSharing
from manyhands.train.trainer import Trainer


def fewest_processes(job: Job, processes: int, machines: int) -> int:
    """How many of its processes a run on some machines goes on with at least, as `--elastic` says."""
    least = min(machines, job.cluster.machines_wanted.start)
    return processes * least // machines if job.cluster.recovers else processes


def passes_of_fewest(cut: BatchSharing, least: int, batch: int) -> tuple[int, str]:
    """Samples that a process takes in one pass where so few are left, and in words; 0 where they can't go on."""
    most = cut.largest_share(batch)
    try:
        then = cut.on_fewer(least, batch)
    except UserError as error:
        return 0, f"can't continue: {error.what}"
    why = f", because BatchNorm needs groups of {cut.group} (train.norm_group)"
    beside = f"instead of {most} with all {cut.processes}{why}" if then > most else f"as with all {cut.processes}"
    return then, f"computes {then} samples in one pass, {beside}"


def held_bytes(device: str) -> int:
    """The most that this process has held so far: of its card's memory, or of its machine's."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def tell_of_fewest(trainer: Trainer) -> None:
    """Says after a run's first update what each process will take where machines are lost, if some may be."""
    world, cut, order = trainer.world, trainer.feed.cut, trainer.feed.order
    least = fewest_processes(trainer.job, world.size, -(-world.size // world.local_size))
    watched = PULSE_FILE in os.environ  # else another program says what becomes of a run
    if least == world.size or not (watched and world.is_main and trainer.network.replicated):
        return
    _, passes = passes_of_fewest(cut, least, min(order.batch, order.length))
    held = held_bytes(world.device)
    told = (
        f"after a loss of machines down to {least} of {world.size} processes (--elastic), each process {passes}; "
        f"rank 0 has used {held / 2**30:.2g} GiB so far"
    )
    trainer.journal.event("note", told, trainer.progress.step, held_bytes=held)
