"""The machines of a run and their states. Starts the agents of the machines."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from manyhands.cluster.agents import protocol, ssh
from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.connection import AgentConnection, LinkClosed, MisunderstoodError, ask_all, close_all
from manyhands.cluster.agents.early import AGENT, raise_file_limit, take_early_agent, usr1_ignored
from manyhands.cluster.doctor.findings import Facts, FactsWanted
from manyhands.cluster.hosts.inventory import LOOPBACK, Address, Machine
from manyhands.cluster.hosts.this_process import is_this_machine
from manyhands.cluster.messages import R, Request, call
from manyhands.config.job import ClusterOptions
from manyhands.core import timeouts
from manyhands.core.errors import EXIT_DOCTOR, RunError, UserError
from manyhands.core.files import file_size, usual_umask
from manyhands.core.stops import stop_signals_as_ctrl_c

SOON_UPDATES = 20  # failures within this many saved updates after joining are consecutive


class MachineState(Enum):
    """The state of a machine in a run, and the meaning of `RunMachine.until` in each state."""

    LOST = "lost"  # no agent answers; until: the next contact
    CONTACTING = "contacting"  # its agent was started and answers requests; until: timeout
    READY = "ready"  # waits for the next start; until: the end of its exclusion
    RUNNING = "running"  # takes part; a lost connection is replaced within SILENT_S


@dataclass(eq=False)
class RunMachine:
    """A machine of a run and the connection to its agent, over all starts of the run."""

    spec: Machine  # its name, how it is reached, and its slots
    state: MachineState = MachineState.CONTACTING
    until: float = 0.0  # when the state ends, by the monotonic clock; 0 if that is not known
    since: float = field(default_factory=time.monotonic)  # when it was lost, requested or excluded
    link: AgentConnection | None = None
    problem: RunError | None = None  # why no agent answered
    facts: Facts = field(default_factory=dict[str, Any], repr=False)  # what the agent reported about the machine
    device: str = ""  # the kind of device that is used
    processes: int = 0
    address: Address = field(default_factory=lambda: Address("", LOOPBACK))  # where the other machines reach it
    store: tuple[str, int] = ("", 0)  # address and port where its processes reach the store of this start
    opened_folder: protocol.RunOpened | None = None  # the run folder on it, as it was opened or inspected last
    position: int = 0  # its index among the machines of the last start that it took part in
    generation: int = -1  # index of that start; -1 for none
    requested: bool = False  # the user waits for it to join
    added: bool = False  # it joined on request of the user
    joined: bool = False  # it joined with the current start
    records_may_differ: bool = False  # its records of the run may differ from the launcher's
    failures: int = 0  # failures in a row
    since_step: int | None = None  # the saved step at which it began to take part
    notify: Callable[[str, bool], object] = lambda _text, _joined: None  # receives how the request to add it ended
    contact: Generator[Request[Any], Any, None] | None = None  # yields the requests before the machine can join
    asked: tuple[int, Request[Any]] | None = None  # id of the last request, and the request

    @property
    def name(self) -> str:
        """The host name, which is unique in a run."""
        return self.spec.name

    @property
    def agent(self) -> AgentConnection:
        """The connection to the machine's agent, which must exist."""
        assert self.link
        return self.link

    @property
    def run_folder(self) -> protocol.RunOpened:
        """The run folder on the machine, which must have been opened."""
        assert self.opened_folder
        return self.opened_folder

    def count_failure(self, step: int) -> float:
        """Counts a failure; `step` is the last saved step. Returns seconds of exclusion: 0 after a first failure."""
        useful = self.since_step is not None and step - self.since_step >= SOON_UPDATES
        self.failures, self.since_step = 1 if useful else self.failures + 1, None
        again = self.failures > 1
        return min(timeouts.EXCLUDED_MOST_S, timeouts.EXCLUDED_S * 2 ** (self.failures - 2)) if again else 0.0

    def lose(self, pause_s: float = 0.0) -> None:
        """Ends the connection. The next contact is in `pause_s`, but not before RETRY_LEAST_S unless `requested`."""
        self._change_state(MachineState.LOST)
        self.until = self.since + max(pause_s, 0.0 if self.requested else timeouts.RETRY_LEAST_S)
        self.disconnect()

    def exclude(self, pause_s: float) -> None:
        self._change_state(MachineState.READY)
        self.until = self.since + pause_s

    def _change_state(self, state: MachineState) -> None:
        self.state, self.since, self.since_step = state, time.monotonic(), None
        self.joined, self.records_may_differ = False, True

    def set_device(self, requested: int, device: str, count: int) -> None:
        """Sets the device type and the number of processes: `requested`, or `count` devices if `requested` is 0.

        Raises UserError if there are fewer accelerators than processes.
        """
        if requested > count and device not in {"cpu", "mps"}:
            what = f"{self.name} has {count} {device} devices, but {requested} processes are requested"
            hints = (f'write "{self.spec.target} slots={count}"', "or train on the CPU: --device cpu")
            raise UserError(what, "cluster.hosts", hints)
        self.device, self.processes = device, requested or count

    def disconnect(self) -> None:
        link, self.link, self.facts = self.link, None, {}
        self.contact = self.asked = None
        if link:
            link.close(0.0)


class Machines:
    """All machines of a run, including lost machines. Running machines are in rank order."""

    def __init__(self, machines: list[RunMachine]) -> None:
        self.all = machines

    @property
    def running(self) -> list[RunMachine]:
        return [machine for machine in self.all if machine.state is MachineState.RUNNING]

    @property
    def waiting(self) -> list[RunMachine]:
        """The machines that don't take part now, but may join or rejoin."""
        return [machine for machine in self.all if machine.state is not MachineState.RUNNING]

    @property
    def links(self) -> list[AgentConnection]:
        return [machine.agent for machine in self.running]

    @property
    def problems(self) -> dict[str, RunError]:
        return {machine.name: machine.problem for machine in self.all if machine.problem}

    def heartbeat(self) -> None:
        for link in self.links:
            link.heartbeat()

    def ask(self, requests: Mapping[RunMachine, Request[R]], timeout_s: float) -> dict[RunMachine, R]:
        """Sends requests and returns the answers. Raises RunError if a machine is lost or a request failed."""
        asked, answers = {machine.agent: machine for machine in requests}, dict[RunMachine, R]()
        found = ask_all({link: requests[machine] for link, machine in asked.items()}, timeout_s, self.links)
        for link, answer in found.items():
            if isinstance(answer, RunError):
                raise answer
            answers[asked[link]] = answer
        return answers

    def ask_each(self, request: Request[R], timeout_s: float = timeouts.REQUEST_S) -> dict[RunMachine, R]:
        """Sends the same request to every running machine and returns the answers. Raises like `ask`."""
        return self.ask(dict.fromkeys(self.running, request), timeout_s)

    def ask_named(self, requests: Mapping[str, Request[R]], timeout_s: float) -> dict[str, R | RunError]:
        """Sends requests to machines by name; returns the answer or the error of each machine."""
        asked = {machine.agent: requests[machine.name] for machine in self.running if machine.name in requests}
        return {link.machine.name: answer for link, answer in ask_all(asked, timeout_s, self.links).items()}

    def require_all(self) -> None:
        """Raises RunError, with hints, if a machine's agent doesn't answer."""
        if not (problems := self.problems):
            return
        error, *others = problems.values()
        if others:
            hints = tuple(f"{problem.message}: {problem.hints[0]}" for problem in problems.values())
            error = RunError(f"{len(problems)} machines can't be used", ", ".join(problems), hints)
        error.exit_code = EXIT_DOCTOR
        raise error

    def close(self, patience_s: float = 5.0) -> None:
        close_all([machine.link for machine in self.all if machine.link], patience_s)


FILES_EACH, OWN_FILES = 2, 200  # pipes for each agent; files of the launcher itself
STOPPED_S = 1.0  # agents are killed this long after a stop request while no worker runs


@contextmanager
def started_agents(
    machines: Sequence[Machine],
    options: ClusterOptions,
    logs: Path,
    wanted: FactsWanted,
    on_stop: Callable[[], object] = lambda: None,
) -> Iterator[Machines]:
    """Context manager that starts an agent on each machine, yields the machines with their facts, and ends the agents.

    Files in `logs` receive the agents' standard error. At a stop signal in the context, such as Ctrl-C, `on_stop` is
    called before the agents are ended.
    """
    allow_open_files(OWN_FILES + FILES_EACH * len(machines))
    found = Machines([])
    with stop_signals_as_ctrl_c():
        try:
            for machine in machines:
                found.all.append(RunMachine(machine, link=open_agent(machine, options, logs)))
            _request_facts(found, options, wanted)
            yield found
        except KeyboardInterrupt:
            on_stop()
            found.close(STOPPED_S)  # also ends agents that are busy
            raise
        finally:
            found.close()


def allow_open_files(count: int) -> None:
    """Increases this process's limit of open files to `count`. Raises UserError if the hard limit is lower."""
    if (most := raise_file_limit(count)) < count:
        what = f"the connections to the machines need {count:,} open files, but the limit for this user is {most:,}"
        raise UserError(what, "cluster.hosts", (f"raise the limit in a root shell: ulimit -Hn {count}",))


def open_local_agent(log: Path, machine: Machine | None = None) -> AgentConnection:
    """Starts an agent on this machine, or connects to the agent that `start_early_agent` started."""
    log_start, agent = file_size(log), take_early_agent()
    if agent is None:
        agent = _start_process([sys.executable, *AGENT], log)
    elif agent.stdin:
        log.touch(mode=0o600)  # fails here, with its reason, where the agent couldn't write
        with suppress(BrokenPipeError):  # the first request reports an agent that has ended
            agent.stdin.write(os.fsencode(log.absolute()) + b"\0")
            agent.stdin.flush()
    return AgentConnection(machine or Machine("localhost"), agent, log, here=True, log_start=log_start)


def _start_process(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    pipe, mask = subprocess.PIPE, usual_umask()
    with log.open("ab") as output, usr1_ignored():
        try:
            # In a new session, so that Ctrl-C and the end of the terminal reach only the launcher.
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=output, start_new_session=True, umask=mask)
        except OSError as error:
            what = f"{command[0]} can't be started: {error.strerror}"
            raise UserError(what, "cluster.ssh", ("set cluster.ssh to an installed ssh program",)) from None


def open_agent(machine: Machine, options: ClusterOptions, logs: Path) -> AgentConnection:
    """Starts the agent of one machine. If the start fails, the first request to the agent raises the error."""
    if is_this_machine(machine):
        return open_local_agent(logs / "agent.log", machine)
    log = logs / f"agent@{machine.name}.log"
    command, log_start = ssh.agent_command(machine, options, Path.cwd()), file_size(log)
    link = AgentConnection(machine, _start_process(command, log), log, here=False, log_start=log_start)
    link.connect_again = lambda words: _start_process(ssh.agent_command(machine, options, Path.cwd(), words), log)
    return link


def _request_facts(machines: Machines, options: ClusterOptions, wanted: FactsWanted) -> None:
    """Requests the facts of all machines. Machines that answer become RUNNING; other machines become LOST."""
    asked, links = time.time(), {machine.agent: machine for machine in machines.all}
    requests = {link: call(Agent.hello, wanted, not link.here) for link in links}
    answers = ask_all(requests, timeouts.HELLO_S + timeouts.HELLO_EACH_S * len(links))
    close_all([link for link, answer in answers.items() if isinstance(answer, LinkClosed)])
    for link, machine in links.items():
        answer = answers[link]
        if isinstance(answer, LinkClosed):
            machine.problem = ssh.explain_contact(machine.spec, link.close(), link.log_tail(), options)
        elif isinstance(answer, MisunderstoodError):
            machine.problem = answer
        elif isinstance(answer, RunError):
            raise answer
        else:
            machine.state, machine.facts = MachineState.RUNNING, answer
            link.clock_offset_s = clock_offset(answer.get("time", 0.0), asked)
    for machine in machines.waiting:
        machine.lose()


def clock_offset(remote_time: float, request_time: float) -> float:
    """Returns the smallest clock offset (s) that explains the `remote_time` in an answer to our request."""
    now = time.time()
    return remote_time - now if remote_time > now else min(0.0, remote_time - request_time)


def prepare_machines(machines: Machines, options: ClusterOptions, processes: int | None = None) -> None:
    """Makes the machines import torch, and sets the device type and the number of processes of each machine.

    `processes` is the number per machine; None: its slots, or one per device. Raises UserError if devices are missing.
    """
    sizes = {machine: machine.spec.slots if processes is None else processes for machine in machines.running}
    threads, device = options.threads, options.device
    requests = {machine: call(Agent.prepare_workers, size, threads, device) for machine, size in sizes.items()}
    for machine, devices in machines.ask(requests, timeouts.PREPARE_S).items():
        machine.set_device(sizes[machine], *devices)
