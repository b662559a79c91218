"""What a process says that ends because another one has, in the other's own words where they are known."""

import os
import platform
import time
from typing import Any

from manyhands.config.job import Job
from manyhands.core.records import Failure
from manyhands.core.world import Membership
from manyhands.worker.shared_options import shared_options


def tell_of_outside(job: Job, membership: Membership, what: str) -> None:
    """Has all that wait hear that this process, whose rank is none of theirs, ends."""
    # Its C++ parts would log what is no news here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from manyhands.parallel.meet import tell_of_outsider
    from manyhands.parallel.tell import tell_those_who_wait

    tell_those_who_wait(membership, lambda names: tell_of_outsider(names, shared_options(job), what))


def first_of_all(group: Any, record: Failure) -> Failure:
    """Publishes the first cause for the other processes, or learns it from them where this is a mere consequence."""
    if not record.consequence:
        from manyhands.parallel.said import Told

        group.cause.publish(Told.of(record.rank, record.host, record.what))
        return record
    told = group.cause.learn()
    if not told:
        # Nothing better is known than what the library itself has said.
        what = f"another process has gone, or can't be reached: {record.what}"
        mend = ["the other processes' own last words may say why", *record.mend]
        return record.model_copy(update={"what": what, "mend": mend, "excerpt": ""})
    return record.model_copy(update=heard(told))


def heard(told: Any) -> dict[str, Any]:
    """What a failure's record says where the first cause is another process's; its words, and never its advice."""
    what = f"rank {told.rank} on {told.host} failed first; it says: {told.what}"
    return {"what": what, "mend": [f"rank {told.rank}'s own screen or log says what to do"], "excerpt": ""}


def describe_peer(rank: int, told: Any, trainer: Any) -> Failure:
    """The record of a process that ends because another has; `told` are that one's words, or None where none came."""
    record = Failure(
        time=time.time(),
        rank=rank,
        host=platform.node(),
        pid=os.getpid(),
        step=trainer.progress.step if trainer else None,
        phase=trainer.phase if trainer else "build",
        error="PeerGone",
        what="rank 0's store has gone, and with it the run",
        mend=["rank 0's own last words say why"],
        consequence=True,
    )
    return record.model_copy(update=heard(told)) if told else record
