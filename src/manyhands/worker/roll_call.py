"""Where no agent of ours watches the processes: one whose step doesn't come calls the roll and names who is missing.

In a run that goes on nothing is sent but a question to the store, once a second, whether somebody has called.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from manyhands.cluster.agents.protocol import WorkersSeen
from manyhands.cluster.agents.pulses import look_at
from manyhands.cluster.agents.stall import Stalls
from manyhands.core.machine import this_machine
from manyhands.core.pulse import PULSE_S, Pulse, Seen
from manyhands.core.world import Membership
from manyhands.parallel.newcomers import close_meeting
from manyhands.parallel.said import Answer, understood

# Over so long each counts what it computes and moves, while nobody speaks with the store.
_COUNTED_S = 3.0
# Who hasn't answered after so long gives no sign of life; nor does a store.
_PATIENCE_S = 10.0
# How a process came to be whose screen nobody else writes on.
BY_HAND = "--init"


class RollCall:
    """This process's part in calling the roll.

    Args:
        store: of all processes.
        membership: this process's place.
        present: what each process said of itself when all met, by rank.
        pulse: says how far this process is.
        say: tells the user who is missing; called on each late process that was started by hand, else on one.
    """

    def __init__(
        self,
        store: Any,
        membership: Membership,
        present: Mapping[int, Mapping[str, Any]],
        pulse: Callable[[], Pulse],
        say: Callable[[str], None],
    ) -> None:
        by_file, own = membership.init.startswith("file://"), dist.PrefixStore(f"roll/{membership.attempt}", store)
        # A client of its own, so that the main thread never waits for this one's answers; but a second one of a file
        # writes into it as it goes, and makes it anew where rank 0 has just removed it.
        self._store = own if by_file else own.clone()
        self._membership, self._present, self._pulse, self._say = membership, present, pulse, say
        self._held_by_rank_0 = not membership.agent_store and not by_file
        # On the process that holds the store: its port, until it is closed to strangers.
        self._open_port = store.port if self._held_by_rank_0 and membership.rank == 0 else 0
        if self._held_by_rank_0:
            self._store.add("attending", 1)
        self._told, self._asked_at, self._over = False, float("inf"), threading.Event()

    @contextlib.contextmanager
    def taken_part(self) -> Generator[None]:
        """Calls and answers as long as the block lasts; a second thread watches a store whose holder may be stopped."""
        threads = [threading.Thread(target=each, daemon=True) for each in (self._attend, self._watch_the_store)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(PULSE_S)

    def _attend(self) -> None:
        number = 0
        with contextlib.suppress(dist.DistError):  # the store has gone, and others say why
            while not self._over.wait(PULSE_S):
                late = self._pulse().late
                self._told = self._told and late
                with self._asking():
                    if late and not self._told:
                        self._store.set(str(number), "called")
                    called = self._store.check([str(number)])
                    all_attend = self._open_port and self._store.add("attending", 0) >= len(self._present)
                if all_attend:
                    self._close_meeting()
                if called:
                    self._answer(number)
                    number += 1

    def _close_meeting(self) -> None:
        here = this_machine()
        others = {who["machine"]: who["addresses"] for who in self._present.values() if who["machine"] != here}
        close_meeting(self._open_port, list(others.values()))
        self._open_port = 0

    def _watch_the_store(self) -> None:
        while not self._over.wait(PULSE_S):
            asked_s = time.monotonic() - self._asked_at
            if asked_s > _PATIENCE_S and self._pulse().late and self._held_by_rank_0 and not self._told:
                mine = [self._seen(self._membership.rank, self._pulse())] * 2
                self._tell({self._membership.rank: mine} | self._from_outside([0], asked_s), speaker=1)

    @contextlib.contextmanager
    def _asking(self) -> Generator[None]:
        self._asked_at = time.monotonic()
        yield
        self._asked_at = float("inf")

    def _answer(self, number: int) -> None:
        """Answers a call, and names who didn't where this process has waited too long itself."""
        begun, before = time.monotonic(), self._pulse()
        if self._over.wait(_COUNTED_S):
            return
        answer = Answer(before=before, now=self._pulse())
        with self._asking():
            self._store.set(f"{number}/{self._membership.rank}", answer.model_dump_json())
        if not answer.now.late or self._told:
            return
        answers = self._collect(number)
        seen = {rank: [self._seen(rank, pulse) for pulse in (said.before, said.now)] for rank, said in answers.items()}
        late = [rank for rank, said in answers.items() if said.now.late]
        silent = [rank for rank in self._present if rank not in answers]
        self._tell(seen | self._from_outside(silent, time.monotonic() - begun), min(late, default=0))

    def _collect(self, number: int) -> dict[int, Answer]:
        answers, until = dict[int, Answer](), time.monotonic() + _PATIENCE_S
        while len(answers) < len(self._present) and time.monotonic() < until and not self._over.wait(PULSE_S):
            for rank in self._present.keys() - answers.keys():
                key = f"{number}/{rank}"
                with self._asking():
                    said = understood(self._store.get(key), Answer) if self._store.check([key]) else None
                if said:
                    answers[rank] = said
        return answers

    def _from_outside(self, silent: Sequence[int], quiet_s: float) -> dict[int, list[Seen]]:
        """Those that don't answer, as far as the system of this machine tells of them."""
        pulse = self._pulse().model_copy(update={"still_s": 0.0, "calls": -1, "moved_bytes": 0, "cpu_s": 0.0})
        seen = {rank: [self._seen(rank, pulse, quiet_s)] for rank in silent}
        self._over.wait(_COUNTED_S)
        return {rank: [*first, self._seen(rank, pulse, quiet_s)] for rank, first in seen.items()}

    def _seen(self, rank: int, pulse: Pulse, quiet_s: float = 0.0) -> Seen:
        who, known = self._present[rank], pulse.model_dump()
        if quiet_s and who["machine"] == this_machine() and (found := look_at(who["pid"])):
            known |= found
        return Seen(**{"stopped": False, **known, "rank": rank, "pid": who["pid"], "quiet_s": quiet_s})

    def _tell(self, seen: Mapping[int, Sequence[Seen]], speaker: int) -> None:
        stalls = Stalls()
        for rank, (first, last) in seen.items():
            for at, each in ((time.monotonic() - _COUNTED_S, first), (time.monotonic(), last)):
                stalls.take(WorkersSeen(self._present[rank]["host"], [each]), at)
        self._told = True
        if (words := stalls.to_say()) and (self._membership.rank == speaker or self._membership.started_by == BY_HAND):
            self._say(words)
