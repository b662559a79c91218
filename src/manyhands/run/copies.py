"""Where machines share no disk, a second one holds each checkpoint; here it is given the records up to it."""

import contextlib
import time
from collections.abc import Collection, Sequence

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.connection import AgentConnection
from manyhands.cluster.agents.mirror import Sender
from manyhands.cluster.agents.protocol import RunOpened
from manyhands.cluster.messages import call
from manyhands.core.errors import RunError
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import COPY_S

# Interval between two transfers of records.
CARRY_S = 0.4


class RecordsCopy:
    """Carries the records from the head's folder, which has them all, to one machine.

    Args:
        link: to it.
        folder: the run folder there.
        sender: looks for what is new here.
    """

    def __init__(self, link: AgentConnection, folder: str, sender: Sender) -> None:
        self._link, self._folder, self._sender, self._at = link, folder, sender, 0.0

    def carry(self) -> None:
        """Sends what is new, now and then; without waiting."""
        if self._link.closed or time.monotonic() < self._at:
            return
        self._at = time.monotonic() + CARRY_S
        if pieces := list(self._sender.news()):
            self._link.post(call(Agent.keep_records, self._folder, pieces))

    def finish(self) -> None:
        """Sends the rest, and waits until it is there; a machine that has gone meanwhile is another's to tell of."""
        with contextlib.suppress(RunError):
            while not self._link.closed and (pieces := list(self._sender.news())):
                self._link.ask(call(Agent.keep_records, self._folder, pieces), COPY_S)


def copy_of_records(
    folder: RunFolder, links: Sequence[AgentConnection], opened: Sequence[RunOpened], estranged: Collection[str]
) -> RecordsCopy | None:
    """Who is to have the records too: the first machine but rank 0's that has a disk of its own; None where none has.

    Args:
        folder: the run folder here.
        links: the machines, in the order of ranks.
        opened: the run folder on each.
        estranged: names of those whose own records may be others than ours, and are kept aside.
    """
    if not (opened[0].shared or opened[0].own):
        return None
    for link, there in list(zip(links, opened, strict=True))[1:]:
        if there.own:
            held = {} if link.machine.name in estranged else there.held
            return RecordsCopy(link, there.folder, Sender(folder.path, held))
    return None
