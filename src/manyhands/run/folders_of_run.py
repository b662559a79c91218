"""The run folder on each of a run's machines: opened for this head, and given what the newest checkpoint needs."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.assemble import AgentLinks
from manyhands.cluster.agents.claim import new_holder, run_id
from manyhands.cluster.agents.connection import AgentConnection
from manyhands.cluster.agents.mirror import Receiver, pieces_of
from manyhands.cluster.agents.protocol import OpenRun, RunOpened
from manyhands.cluster.messages import Request, call
from manyhands.core.errors import RunError
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import COPY_S, OPEN_FOLDER_S, TAKE_OVER_S
from manyhands.run.pending import PendingMachines, RejoinInfo

REPLACED = "another launcher has taken over the run"


class FoldersOfRun:
    """The run folder on each machine; `receiver` writes the records that arrive into the head's `folder`."""

    def __init__(self, agents: AgentLinks, folder: RunFolder, receiver: Receiver, pending: PendingMachines) -> None:
        self._agents, self._folder, self._receiver, self._pending = agents, folder, receiver, pending
        self._holder = new_holder()
        self.opened: list[RunOpened] = []  # what each machine said last
        self.parts: dict[str, RejoinInfo] = {}  # of each machine that has taken part in a start
        self.estranged: set[str] = set()  # whose records of the run may be others than ours
        self.before: int | None = None  # the newest step that was saved before this run's first start

    def open(self, *, output: bool, records: bool = True, anew: bool = False) -> list[RunOpened]:
        """The run folder on every machine, at the same place in its work folder; a shared one is known by a token.

        Args:
            output: the first machine sends what rank 0 prints, too.
            records: it sends the records.
            anew: all of them, since those that are here may be others; they are kept aside.
        """
        mine = self._pending.term
        with self._recognised() as token:
            requests = [
                self._request(link, token, records=records and number == 0, output=output, anew=anew)
                for number, link in enumerate(self._agents.links)
            ]
            self.opened = self._agents.ask(requests, TAKE_OVER_S if mine else OPEN_FOLDER_S)
        highest = max(answer.term for answer in self.opened)
        if highest > mine > 0 and self.before is None:
            self._pending.term = highest + 1
            return self.open(output=output, records=records, anew=anew)
        if highest > mine > 0:
            raise RunError(REPLACED)
        self.before = self.saved if self.before is None else self.before
        return self.opened

    def open_on(self, link: AgentConnection) -> RunOpened:
        """The same on a machine that has come."""
        with self._recognised() as token:
            return link.ask(self._request(link, token, records=False, output=False), OPEN_FOLDER_S, self._agents.links)

    @contextmanager
    def _recognised(self) -> Iterator[str]:
        """A token by which machines see that the head's own run folder is theirs."""
        token = f".shared-{secrets.token_hex(8)}"
        marker = self._folder.ranks / token
        marker.touch()
        try:
            yield token
        finally:
            marker.unlink()

    def _request(
        self, link: AgentConnection, token: str, *, records: bool, output: bool, anew: bool = False
    ) -> Request[RunOpened]:
        place = str(self._folder.path.absolute()) if link.here else self.part_of(link.machine.name).folder
        held = None if not records else {} if anew else self._receiver.held()
        run, term = run_id(self._folder), self._pending.term
        return call(Agent.open_run, OpenRun(place, token, self._holder, run, held, output, term))

    def part_of(self, name: str) -> RejoinInfo:
        """A machine's part, with the run folder as it was opened there, or as seen from the work folder."""
        if name in self.parts:
            return self.parts[name]
        path = self._folder.path.absolute()
        return RejoinInfo(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))

    @property
    def saved(self) -> int:
        """The newest step that is saved on any machine; -1 for none."""
        return max(answer.saved for answer in self.opened)

    def newest_first(self) -> tuple[AgentConnection, RunOpened]:
        """Has the first machine be one that has the newest checkpoint; the others keep their order."""
        order = sorted(range(len(self.opened)), key=lambda number: self.opened[number].saved < self.saved)
        for listed in (self._agents.links, self._agents.facts, self.opened):
            listed[:] = [listed[number] for number in order]  # type: ignore[reportUnknownMemberType]
        return self._agents.links[0], self.opened[0]

    def give_records(self, link: AgentConnection, there: RunOpened) -> None:
        """Rank 0 goes on with what is in the head's folder, which knows of the fault and of what came before."""
        if link.here or there.shared:
            return
        # What a machine wrote last before it was lost needn't have come here, so that its own may be others.
        held = {} if link.machine.name in self.estranged else there.held
        for pieces in pieces_of(self._folder.path, held):
            link.ask(call(Agent.keep_records, there.folder, pieces), COPY_S, self._agents.links)
        self.estranged.discard(link.machine.name)
