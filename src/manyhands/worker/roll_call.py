"""Liveness check without agents: a process whose step is late calls all processes and reports those without an answer.

Calls and answers go through the rendezvous store, which each process checks for calls once a second.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from manyhands.cluster.agents.heartbeats import process_state
from manyhands.cluster.agents.protocol import WorkersSeen
from manyhands.cluster.agents.stall import StallDetector
from manyhands.core.machine import machine_id
from manyhands.core.timeouts import HEARTBEAT_S
from manyhands.core.world import ProcessInfo
from manyhands.parallel.group.heartbeat import Heartbeat, ObservedHeartbeat
from manyhands.parallel.group.listeners import close_rendezvous
from manyhands.parallel.group.rendezvous import LivenessAnswer, parse_message
from manyhands.train.status import in_background

_ANSWER_INTERVAL_S = 3.0  # seconds between the two heartbeats of an answer; the store is not used meanwhile
_SILENT_S = 10.0  # seconds without an answer after which a process or the store counts as silent
BY_HAND = "--init"  # `started_by` of processes that have their own terminals


class LivenessCheck:
    """The liveness check of this process.

    `processes`: machine, host, addresses and pid of each process, by rank, from the rendezvous. `say`: prints a report
    of missing processes, on every late process if the processes were started by hand, else on one late process.
    """

    def __init__(
        self,
        store: Any,
        process_info: ProcessInfo,
        processes: Mapping[int, Mapping[str, Any]],
        heartbeat: Callable[[], Heartbeat],
        say: Callable[[str], None],
    ) -> None:
        by_file, own = process_info.init.startswith("file://"), dist.PrefixStore(f"roll/{process_info.attempt}", store)
        # A separate client, so that the main thread never waits for this thread's answers. A second client of a file
        # would create the file again after rank 0 has removed it.
        self._store = own if by_file else own.clone()
        self._process_info, self._present, self._heartbeat, self._say = process_info, processes, heartbeat, say
        self._held_by_rank_0 = not process_info.agent_store and not by_file
        # The port of this process's store, until the store is closed to other hosts.
        self._open_port = store.port if self._held_by_rank_0 and process_info.rank == 0 else 0
        if self._held_by_rank_0:
            self._store.add("attending", 1)
        self._reported, self._request_began, self._ended = False, float("inf"), threading.Event()

    def run_in_background(self) -> contextlib.AbstractContextManager[None]:
        """Runs the check within the context. One thread calls and answers, and a second thread watches the store."""
        return in_background(self._ended, self._check_calls, self._watch_the_store)

    def _check_calls(self) -> None:
        number = 0
        with contextlib.suppress(dist.DistError):  # the store has ended, which is reported elsewhere
            while not self._ended.wait(HEARTBEAT_S):
                late = self._heartbeat().late
                self._reported = self._reported and late
                with self._timed_request():
                    if late and not self._reported:
                        self._store.set(str(number), "called")
                    called = self._store.check([str(number)])
                    all_attend = self._open_port and self._store.add("attending", 0) >= len(self._present)
                if all_attend:
                    here, every = machine_id(), self._present.values()
                    others = {each["machine"]: each["addresses"] for each in every if each["machine"] != here}
                    close_rendezvous(self._open_port, list(others.values()))
                    self._open_port = 0
                if called:
                    self._answer(number)
                    number += 1

    def _watch_the_store(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            asked_s = time.monotonic() - self._request_began
            if asked_s > _SILENT_S and self._heartbeat().late and self._held_by_rank_0 and not self._reported:
                mine = [self._observe(self._process_info.rank, self._heartbeat())] * 2
                self._report_silent({self._process_info.rank: mine} | self._observe_silent([0], asked_s), reporter=1)

    @contextlib.contextmanager
    def _timed_request(self) -> Generator[None]:
        self._request_began = time.monotonic()
        yield
        self._request_began = float("inf")

    def _answer(self, call: int) -> None:
        """Answers a call. If this process is late too, collects all answers and reports silent processes."""
        begun, before = time.monotonic(), self._heartbeat()
        if self._ended.wait(_ANSWER_INTERVAL_S):
            return
        answer = LivenessAnswer(before=before, now=self._heartbeat())
        with self._timed_request():
            self._store.set(f"{call}/{self._process_info.rank}", answer.model_dump_json())
        if not answer.now.late or self._reported:
            return
        answers = self._collect_answers(call)
        seen = {rank: [self._observe(rank, one.before), self._observe(rank, one.now)] for rank, one in answers.items()}
        late = [rank for rank, said in answers.items() if said.now.late]
        silent = [rank for rank in self._present if rank not in answers]
        self._report_silent(seen | self._observe_silent(silent, time.monotonic() - begun), min(late, default=0))

    def _collect_answers(self, call: int) -> dict[int, LivenessAnswer]:
        answers, until = dict[int, LivenessAnswer](), time.monotonic() + _SILENT_S
        while len(answers) < len(self._present) and time.monotonic() < until and not self._ended.wait(HEARTBEAT_S):
            for rank in self._present.keys() - answers.keys():
                key = f"{call}/{rank}"
                with self._timed_request():
                    if self._store.check([key]) and (said := parse_message(self._store.get(key), LivenessAnswer)):
                        answers[rank] = said
        return answers

    def _observe_silent(self, silent: Sequence[int], quiet_s: float) -> dict[int, list[ObservedHeartbeat]]:
        """Returns two observations of each silent process, some seconds apart, by this machine's system, by rank."""
        heartbeat = self._heartbeat().model_copy(update={"still_s": 0.0, "calls": -1, "moved_bytes": 0, "cpu_s": 0.0})
        seen = {rank: [self._observe(rank, heartbeat, quiet_s)] for rank in silent}
        self._ended.wait(_ANSWER_INTERVAL_S)
        return {rank: [*first, self._observe(rank, heartbeat, quiet_s)] for rank, first in seen.items()}

    def _observe(self, rank: int, heartbeat: Heartbeat, quiet_s: float = 0.0) -> ObservedHeartbeat:
        who, known = self._present[rank], heartbeat.model_dump()
        if quiet_s and who["machine"] == machine_id() and (found := process_state(who["pid"])):
            known |= found
        return ObservedHeartbeat(**{"stopped": False, **known, "rank": rank, "pid": who["pid"], "quiet_s": quiet_s})

    def _report_silent(self, seen: Mapping[int, Sequence[ObservedHeartbeat]], reporter: int) -> None:
        stalls = StallDetector()
        for rank, (first, last) in seen.items():
            for at, each in ((time.monotonic() - _ANSWER_INTERVAL_S, first), (time.monotonic(), last)):
                stalls.add_report(WorkersSeen(self._present[rank]["host"], [each]), at)
        self._reported = True
        reports = self._process_info.rank == reporter or self._process_info.started_by == BY_HAND
        if (words := stalls.new_warning()) and reports:
            self._say(words)
