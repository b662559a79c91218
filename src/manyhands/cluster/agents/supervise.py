"""Supervises the workers of one start: forwards Ctrl-C, detects lost machines, and waits until all workers exit."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.cluster.agents import protocol
from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.connection import AgentConnection, close_all, wait_for_links
from manyhands.cluster.agents.stall import StallDetector
from manyhands.cluster.failures import Ending, describe_exit
from manyhands.cluster.messages import Message, Misunderstood, RequestFailed, call
from manyhands.core import timeouts
from manyhands.core.errors import EXIT_USAGE, UserError
from manyhands.core.stops import on_stop

POLL_S = 0.1


@dataclass
class WatchHooks:
    """Callbacks and options for the supervision of one start."""

    on_tick: Callable[[], None] = lambda: None  # called every POLL_S
    on_stop: Callable[[], None] = lambda: None  # called at the first request to stop
    on_warning: Callable[[str], None] = lambda _text: None  # receives the first failure at once, and why a run stalls
    on_file: Callable[[protocol.FilePiece], None] = lambda _piece: None  # receives the records of another machine
    stalls: bool = True  # True: report stalls
    recovers: bool = False  # restart after a fault: hung processes are killed, peers of a lost machine save
    lost_tunnel: Callable[[], str] = str  # returns why a tunnel of the launcher ended; else ""
    regroups: Callable[[], bool] = lambda: False  # if True at a tick, the processes save and exit for a restart


def supervise_once(orders: Mapping[AgentConnection, protocol.Orders], watch: WatchHooks) -> Ending:
    """Sends each agent its orders and waits until all workers have ended. Agents that aren't lost accept new orders.

    At the first stop signal the workers save and exit; the second kills the workers. If workers of a machine fail, or
    the machine is lost, the workers of all other machines are ended too.
    """
    head, signals = _LauncherState(orders, watch), list[int]()
    try:
        with on_stop(lambda number, _frame: signals.append(number)):
            for link, order in orders.items():
                link.last_received = time.monotonic()
                link.post(call(Agent.start_workers, order))
            while head.running:
                ready = wait_for_links(orders, POLL_S)
                head.extend_limits_after_pause()
                for link in ready:
                    head.receive_messages(link)
                head.forward_stops(len(signals))
                head.check_links()
                watch.on_tick()
                if watch.regroups():
                    head.regroup()
    except BaseException:
        close_all(orders)
        raise
    watch.on_tick()
    return head.ending


class _LauncherState:
    """The launcher's state during one start of workers: the running agents, time limits and the results so far."""

    def __init__(self, links: Collection[AgentConnection], watch: WatchHooks) -> None:
        self.ending, self._watch = Ending(), watch
        self._links, self.running = links, set(links)
        self._started, self._disconnected = set[AgentConnection](), set[AgentConnection]()
        self._kill_at = self._end_at = float("inf")
        self._failure_reported, self._stopped_elsewhere = False, 0
        self._stalls, self._asked_at, self._awaited = StallDetector(), float("inf"), list[str]()
        self._looked_at, self._paused_s, self._paused_at = time.monotonic(), 0.0, 0.0

    def receive_messages(self, link: AgentConnection) -> None:
        for _, message in link.read():
            self._handle_message(link, message)
        if link.closed and link in self.running:
            self._lose_machine(link)

    def _handle_message(self, link: Any, message: Message) -> None:
        match message:
            case protocol.WorkersStarted():
                self._started.add(link)
            case protocol.WorkersSeen():
                self._stalls.add_report(message)
            case protocol.WorkerExited():
                self._report_exit(message)
            case protocol.StillLeaving() if self._kill_at < float("inf") and self._watch.recovers:
                self._kill_at = time.monotonic() + timeouts.LEAVE_OTHERS_S
            case protocol.HeadReplaced() if not self.ending.replaced:
                self.ending.replaced = f"the run was stopped from {link.machine.name} or taken over by another launcher"
                self._watch.on_warning(self.ending.replaced)
            case protocol.FilePiece():
                self._watch.on_file(message)
            case protocol.WorkersEnded():
                self._add_results(link, message)
            case protocol.TunnelEnded():
                self._handle_ended_tunnel(message.what)
            case RequestFailed():
                self._handle_refusal(link, message)
            case _:
                pass

    def forward_stops(self, stop_requests: int) -> None:
        """Forwards new stop requests to the workers. `stop_requests` is the number of signals received so far."""
        if self.ending.replaced and not (self.ending.interrupted or stop_requests):
            self._stopped_elsewhere = 1
        stop_requests += self._stopped_elsewhere
        if stop_requests == self.ending.interrupted:
            return
        before, self.ending.interrupted = self.ending.interrupted, stop_requests
        self._send_command(protocol.WorkerCommand("stop" if stop_requests == 1 else "kill"))
        if not before:
            self._asked_at = time.monotonic()
            self._watch.on_stop()
        if stop_requests > 1:
            self._end_at = min(self._end_at, time.monotonic() + timeouts.KILL_S)
            for link in self._silent_links(time.monotonic()):
                link.process.kill()

    def regroup(self) -> None:
        """Makes the workers save and exit for a restart, if the workers of all machines are running."""
        if not (self.ending.regrouped or self.ending.interrupted) and self.running == self._started:
            self.ending.regrouped = True
            self._send_command(protocol.WorkerCommand("stop"))

    def check_links(self) -> None:
        """Sends heartbeats, reports stalls, and ends the connections to machines that don't respond in time."""
        for link in self._links:  # also machines whose workers have ended, which the next start needs
            if link.connected == (link in self._disconnected):
                self._disconnected ^= {link}
                how = "reconnected to" if link.connected else "lost the connection to"
                self._watch.on_warning(f"{how} {link.machine.name}{'' if link.connected else '; reconnecting'}")
            link.heartbeat()
            link.flush()
        now = time.monotonic()
        self._drop_silent_machines(now)
        self._report_awaited(now)
        if self._watch.stalls and (why := self._stalls.new_warning()):
            self._watch.on_warning(why)
        if not self.ending.lost_tunnel and (why := self._watch.lost_tunnel()):
            self._handle_ended_tunnel(why)
        if self._watch.recovers and not self.ending.interrupted:
            self._evict_hung_rank()
        if self.ending.interrupted == 1 and not self.ending.hung and now - self._asked_at > timeouts.HUNG_S:
            self.ending.hung = self._stalls.why_hung()
            self._kill_at = now if self.ending.hung else self._kill_at
        if now > self._kill_at:
            self._kill_at, self._end_at = float("inf"), min(self._end_at, now + timeouts.KILL_S)
            self._send_command(protocol.WorkerCommand("kill"))
        if now > self._end_at:
            for link in self.running:
                link.process.kill()

    def extend_limits_after_pause(self) -> None:
        """Extends the time limits of the machines if this process was suspended."""
        now = time.monotonic()
        paused_s, self._looked_at = now - self._looked_at, now
        if paused_s > timeouts.PAUSED_S:
            self._paused_s, self._paused_at = paused_s, now
            for link in self.running:
                link.last_received = min(link.last_received + paused_s, now)

    def _drop_silent_machines(self, now: float) -> None:
        for link in [*self.running]:
            longest_s = timeouts.SILENT_S if link in self._started else timeouts.START_WORKERS_S
            if not link.here and now - link.last_received > longest_s:
                self.receive_messages(link)  # messages that arrived while this process was suspended
                if link in self.running and now - link.last_received > longest_s:
                    self._lose_machine(link, f"no message for {now - link.last_received:.0f} s")

    def _silent_links(self, now: float) -> list[AgentConnection]:
        return [link for link in self.running if not link.here and now - link.last_received > timeouts.AWAITED_S]

    def _report_awaited(self, now: float) -> None:
        """Prints the machines that delay a stop: those that are silent, or all that remain if a machine was lost."""
        if self.ending.interrupted != 1:
            return
        silent = self._silent_links(now) if now - self._asked_at > timeouts.AWAITED_S else []
        names = sorted(link.machine.name for link in silent or (self.running if self.ending.lost else ()))
        if names and names != self._awaited:
            self._awaited = names
            who = " and ".join(names) + (" (no response)" if silent else "")
            self._watch.on_warning(f"waiting for {who}; press Ctrl-C again to stop at once")

    def _handle_ended_tunnel(self, what: str) -> None:
        """Handles the end of a tunnel between machines: makes workers that wait for data from the tunnel exit."""
        self.ending.lost_tunnel = self.ending.lost_tunnel or what
        if self._watch.recovers:
            self._send_command(protocol.WorkerCommand("free"))
        self._kill_at = min(self._kill_at, time.monotonic() + timeouts.LEAVE_LOST_S)

    def _evict_hung_rank(self) -> None:
        """Kills a rank that blocks all others. The other ranks handle its end as for any failed rank."""
        rank, why = self._stalls.find_blocking_rank() or (-1, "")
        if why and rank not in self.ending.evicted:
            self.ending.evicted[rank], self._failure_reported = why, True
            self._watch.on_warning(why)
            self._send_command(protocol.WorkerCommand("kill", rank))

    def _report_exit(self, exited: protocol.WorkerExited) -> None:
        """Prints why a worker has failed, unless its failure is a consequence of another one."""
        record = exited.record
        later = record is not None and (record.consequence or record.exit_code == EXIT_USAGE)
        if not (self._failure_reported or later or self.ending.interrupted):
            self._failure_reported = True
            how = f": {record.what}" if record else f" {describe_exit(exited.code, worker=True)}"
            self._watch.on_warning(f"rank {exited.rank} on {exited.host}{how}; cleaning up")

    def _handle_refusal(self, link: AgentConnection, failed: RequestFailed) -> None:
        name = link.machine.name
        if isinstance(failed, Misunderstood):
            self.ending.broken = f"{name}: {failed.what}"
        elif failed.traceback:
            self.ending.broken = failed.traceback if link.here else f"{name}: {failed.traceback}"
        else:
            self.ending.refused = UserError(failed.what, failed.where or name, failed.hints)
        self._remove_link(link)

    def _send_command(self, command: Message) -> None:
        for link in self.running:
            link.send(command)

    def _remove_link(self, link: AgentConnection) -> None:
        self.running.discard(link)
        if self.ending.failed or self.ending.broken or self.ending.lost or self.ending.refused:
            patience_s = timeouts.LEAVE_OTHERS_S
            if self.ending.lost and self._watch.recovers:
                self._send_command(protocol.WorkerCommand("free"))
            elif self.ending.lost:
                patience_s = timeouts.LEAVE_LOST_S
            self._kill_at = min(self._kill_at, time.monotonic() + patience_s)
            self._send_command(protocol.WorkerCommand("leave"))

    def _lose_machine(self, link: AgentConnection, how: str = "") -> None:
        if how:
            link.process.kill()
        code = link.close()
        if link.here:
            self.ending.broken = f"the agent {describe_exit(code)}"
        else:
            if self._paused_s > timeouts.SILENT_S > time.monotonic() - self._paused_at:
                self.ending.paused_s = self._paused_s
                how = f"the agent timed out while the launcher was suspended for {self._paused_s:.0f} s"
            tail = link.log_tail(1).strip() or f"ssh {describe_exit(code)}"
            self.ending.lost[link.machine.name] = how = how or f"the connection ended ({tail})"
            if not self.ending.interrupted:
                self._failure_reported = True
                self._watch.on_warning(f"{link.machine.name} is lost: {how}; cleaning up")
        self._remove_link(link)

    def _add_results(self, link: AgentConnection, ended: protocol.WorkersEnded) -> None:
        ending = self.ending
        ending.returned.update(ended.returned)
        ending.failed.update(ended.failed)
        ending.words.update(ended.words)
        ending.hosts.update(dict.fromkeys(ended.failed, ended.host))
        for record in ended.records:
            ending.records[record.rank] = record.model_copy(update={"time": record.time - link.clock_offset_s})
        if ended.broken:
            ending.broken = ended.broken
        elif not ended.returned and not ended.failed and not (ending.interrupted or ending.regrouped):
            ending.broken = f"the workers were ended: {ended.ended_by}"
        self._remove_link(link)
