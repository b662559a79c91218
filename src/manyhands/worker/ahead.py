"""Opens a published data set while its agent imports what workers need, for those that it then forks."""

import contextlib
import threading
from collections.abc import Generator

from manyhands.cluster.agents.orders import Orders
from manyhands.config.job import Job
from manyhands.data.known import is_published
from manyhands.data.open import open_ahead


@contextlib.contextmanager
def opened_ahead(orders: Orders) -> Generator[None]:
    """Has a thread of its own unpack what the workers will open, which has ended with the block."""
    job = Job.model_validate(orders.argument["job"])
    named = orders.argument["task"] == "train" and not orders.argument.get("objects")
    if not named or not is_published(job.data.name) or job.data.held_out:
        yield
        return
    thread = threading.Thread(target=open_ahead, args=(job.data,), name="opens the data", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
