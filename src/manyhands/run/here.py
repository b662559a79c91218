"""The agent of this machine, for a run that needs no other."""

from typing import Any

from manyhands.cluster.agents.connection import AgentConnection, close_all
from manyhands.cluster.agents.orders import Orders, orders_for
from manyhands.cluster.agents.start import open_here
from manyhands.cluster.agents.supervise import Watch
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.core.run_folder import RunFolder
from manyhands.run.recovery import Recovery


class Here:
    """The agent of this machine, which stays for further starts, and its orders.

    Args:
        folder: the run folder.
        rendezvous: who takes part.
        watch: what the head wants to hear of.
        more: what the task needs besides.
    """

    def __init__(self, folder: RunFolder, rendezvous: Rendezvous, watch: Watch, more: dict[str, Any]) -> None:
        self._folder, self._rendezvous, self._watch, self._more = folder, rendezvous, watch, more
        self._link: AgentConnection | None = None

    def link(self) -> AgentConnection:
        """The agent; a new one where it has ended."""
        if self._link is None or self._link.closed:
            self._link = open_here(self._folder.ranks / "agent.log")
        return self._link

    def orders(self, recovery: Recovery) -> Orders:
        """What it is to start next."""
        place = str(self._folder.path.resolve())
        return orders_for(recovery.job, "train", place, self._rendezvous, generation=recovery.number, **self._more)

    def close(self) -> None:
        """Ends the agent."""
        if self._link:
            close_all([self._link])
            self._watch.on_tick()
