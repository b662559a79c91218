"""What each machine's one process does for the doctor: joins all the others and adds up numbers with them, once."""

import os
import time
from pathlib import Path
from typing import Any

from manyhands.cluster.rendezvous import worker_membership
from manyhands.config.job import Job
from manyhands.core.records import FAILURE_FILE, write_json
from manyhands.core.shown import say

# A ring that fits no single packet, and takes no time even on a slow link.
NUMBERS = 10_000


def add_up(argument: dict[str, Any]) -> dict[str, Any]:
    """The entry of a process that an agent started; `argument` is plain data.

    Returns:
        The seconds that joining and adding took.
    """
    job = Job.model_validate(argument["job"])
    membership = worker_membership(job.cluster, os.environ)
    from manyhands.train.failing import describe_failure

    group, start = None, time.monotonic()
    try:
        from manyhands.parallel.group import join

        group = join(membership, "doctor", job.cluster.collective_timeout_s, say)
        _check_sum(group.world)
    except BaseException as error:
        record = describe_failure(error, rank=membership.rank, step=None, phase="doctor")
        write_json(Path(os.environ[FAILURE_FILE]), record)
        raise SystemExit(record.exit_code) from error
    finally:
        if group:
            group.leave()
    return {"seconds": time.monotonic() - start}


def _check_sum(world: Any) -> None:
    import torch
    import torch.distributed as dist

    numbers = torch.full((NUMBERS,), float(world.rank + 1), device=world.device)
    if not world.alone:
        dist.all_reduce(numbers)
    expected = world.size * (world.size + 1) / 2
    if not bool((numbers == expected).all()):
        raise RuntimeError(f"the sum over all machines is wrong: {numbers[0].item()}, expected {expected}")
