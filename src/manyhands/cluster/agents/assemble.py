"""From a list of machines to agents that are there, know each other's addresses, and are ready to start workers."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.connection import AgentConnection, LinkClosed, MisunderstoodError, ask_all, close_all
from manyhands.cluster.agents.early import AGENT, take_early
from manyhands.cluster.agents.ssh import agent_command, explain_contact
from manyhands.cluster.doctor.findings import Contact, Facts, FactsWanted
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.hosts.this_process import is_here
from manyhands.cluster.messages import R, Request, call
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import EXIT_DOCTOR, RunError, UserError
from manyhands.core.files import usual_umask
from manyhands.core.stops import ended_like_ctrl_c
from manyhands.core.timeouts import HELLO_EACH_S, HELLO_S, PREPARE_S, REQUEST_S

# Two pipes for each machine, one more while it is started, and what the head itself needs.
FILES_EACH, OWN_FILES = 2, 200
# Of a wish to stop while nothing runs yet; who isn't gone then is killed.
STOPPED_S = 1.0


@dataclass
class AgentLinks:
    """The agents of all machines, in the order of their ranks."""

    links: list[AgentConnection]  # the conversations
    facts: list[Facts]  # what each machine said of itself
    # machine's name to how far its clock is ahead of ours
    clock_offsets_s: dict[str, float] = field(default_factory=dict[str, float])
    # machine's name to why no agent answers there; such a machine has no link
    contacts: dict[str, Contact] = field(default_factory=dict[str, Contact])

    def keep(self, wanted: Callable[[AgentConnection], bool]) -> None:
        """Leaves out the machines that aren't wanted."""
        kept = [number for number, link in enumerate(self.links) if wanted(link)]
        self.links[:] = [self.links[number] for number in kept]
        self.facts[:] = [self.facts[number] for number in kept]

    def heartbeat(self) -> None:
        """Lets all machines know that their head is there, where it is time to."""
        for link in self.links:
            link.heartbeat()

    def ask(self, requests: Sequence[Request[R]], timeout_s: float = REQUEST_S) -> list[R]:
        """Asks every machine its own question.

        Raises:
            RunError: a machine is gone, or its request failed.
        """
        answers: list[R] = []
        for answer in ask_all(self.links, requests, timeout_s):
            if isinstance(answer, RunError):
                raise answer
            answers.append(answer)
        return answers

    def ask_each(self, request: Request[R], timeout_s: float = REQUEST_S) -> list[R]:
        """Asks every machine the same question."""
        return self.ask([request] * len(self.links), timeout_s)

    def ask_some(self, requests: Mapping[str, Request[R]], timeout_s: float) -> dict[str, R | RunError]:
        """Asks the machines that are named, while the others are kept; for each its answer, or the error."""
        asked = [link for link in self.links if link.machine.name in requests]
        replies = ask_all(asked, [requests[link.machine.name] for link in asked], timeout_s, self.links)
        return {link.machine.name: reply for link, reply in zip(asked, replies, strict=True)}

    def require_all(self) -> None:
        """Refuses to go on without the machines that no agent answers from.

        Raises:
            RunError: names them, and says how to mend it.
        """
        if not self.contacts:
            return
        if len(self.contacts) == 1:
            ((host, contact),) = self.contacts.items()
            error = RunError(contact.what, host, contact.hints)
        else:
            lines = tuple(f"{contact.what}: {contact.hints[0]}" for contact in self.contacts.values())
            error = RunError(f"{len(self.contacts)} machines can't be used", ", ".join(self.contacts), lines)
        error.exit_code = EXIT_DOCTOR
        raise error


@contextmanager
def assembled(
    machines: Sequence[Machine],
    options: ClusterOptions,
    logs: Path,
    wanted: FactsWanted,
    on_stop: Callable[[], object] = lambda: None,
) -> Iterator[AgentLinks]:
    """Starts an agent on each machine and has it say who it is; all are ended with the block.

    Args:
        machines: each but this one is reached over ssh.
        options: of the cluster.
        logs: folder for what the agents write to their standard error.
        wanted: what the agents are asked for beside the general facts.
        on_stop: called where the user ends the block, before the agents have left.
    """
    refuse_doubles(machines)
    allow_open_files(OWN_FILES + FILES_EACH * len(machines))
    links: list[AgentConnection] = []
    with ended_like_ctrl_c():
        try:
            links.extend(open_agent(machine, options, logs) for machine in machines)
            yield _greet(links, options, wanted)
        except KeyboardInterrupt:
            on_stop()
            # Where the connection ends the agent does, whatever it is busy with.
            close_all(links, STOPPED_S)
            raise
        finally:
            close_all(links)


def allow_open_files(count: int) -> None:
    """Lets this process have so many files open, if the system does. Raises UserError: it doesn't."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        what = f"the connections to the machines need {count:,} open files, but the limit for this user is {hard:,}"
        raise UserError(what, "cluster.hosts", (f"raise the limit in a root shell: ulimit -Hn {count}",))
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def refuse_doubles(machines: Sequence[Machine]) -> None:
    """Machines are told apart by their names.

    Raises:
        UserError: one is named twice.
    """
    names = [machine.name for machine in machines]
    twice = sorted({machine.target for machine in machines if names.count(machine.name) > 1})
    if twice:
        hints = f'write "{twice[0]} slots=2" for two processes on this machine'
        raise UserError(f"{', '.join(twice)} is listed twice", "cluster.hosts", (hints,))


def open_here(log: Path, machine: Machine | None = None) -> AgentConnection:
    """Starts an agent on this machine."""
    machine = machine or Machine("localhost")
    early = take_early()
    if early is None or early.stdin is None:
        return _open([sys.executable, *AGENT], machine, log, here=True)
    with log.open("ab") as output:
        log_start = output.tell()
    with suppress(BrokenPipeError):  # that it has ended shows when it is first asked
        early.stdin.write(os.fsencode(log.absolute()) + b"\0")
        early.stdin.flush()
    return AgentConnection(machine, early, log, here=True, log_start=log_start)


def open_there(machine: Machine, options: ClusterOptions, log: Path) -> AgentConnection:
    """Starts an agent on another machine over ssh; whether that works shows when it is first asked."""
    link = _open(agent_command(machine, options, Path.cwd()), machine, log, here=False)
    link.connect_again = lambda words: _start(agent_command(machine, options, Path.cwd(), words), log)
    return link


def _open(command: list[str], machine: Machine, log: Path, *, here: bool) -> AgentConnection:
    log_start = log.stat().st_size if log.exists() else 0
    return AgentConnection(machine, _start(command, log), log, here=here, log_start=log_start)


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C and the terminal's end reach only the head."""
    with log.open("ab") as output:
        try:
            with _usr1_ignored():
                return subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                    umask=usual_umask(),
                )
        except OSError as error:
            what = f"{command[0]} can't be started: {error.strerror}"
            raise UserError(what, "cluster.ssh", ("set cluster.ssh to an installed ssh program",)) from None


@contextmanager
def _usr1_ignored() -> Iterator[None]:
    """What is started within inherits it: a scheduler sends its word to all processes of a job, ssh among them."""
    previous = None
    with suppress(ValueError):  # only the main thread may
        previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGUSR1, previous)


def open_agent(machine: Machine, options: ClusterOptions, logs: Path) -> AgentConnection:
    """Starts the agent of one machine; whether that works shows when it is first asked."""
    if is_here(machine):
        return open_here(logs / "agent.log", machine)
    return open_there(machine, options, logs / f"agent@{machine.name}.log")


def _greet(links: list[AgentConnection], options: ClusterOptions, wanted: FactsWanted) -> AgentLinks:
    asked = time.time()
    patience_s = HELLO_S + HELLO_EACH_S * len(links)
    answers = ask_all(links, [call(Agent.hello, wanted, not link.here) for link in links], patience_s)
    agents = AgentLinks([], [])
    close_all([link for link, answer in zip(links, answers, strict=True) if isinstance(answer, LinkClosed)])
    for link, answer in zip(links, answers, strict=True):
        if isinstance(answer, LinkClosed):
            code = link.close()
            agents.contacts[link.machine.name] = explain_contact(link.machine, code, link.log_tail(), options)
        elif isinstance(answer, MisunderstoodError):
            agents.contacts[link.machine.name] = Contact("other-version", answer.message, answer.hints)
        elif isinstance(answer, RunError):
            raise answer
        else:
            agents.links.append(link)
            agents.facts.append(answer)
            agents.clock_offsets_s[link.machine.name] = clock_offset(answer.get("time", 0.0), asked)
    return agents


def clock_offset(there: float, asked: float) -> float:
    """How far a clock is ahead, as far as the time that the answer took lets us know; 0 within that."""
    now = time.time()
    return there - now if there > now else there - asked if there < asked else 0.0


def prepare(agents: AgentLinks, sizes: Sequence[int], options: ClusterOptions) -> tuple[list[int], list[str]]:
    """Has every machine import torch, and learns the number of processes where it is left to the machine.

    Returns:
        Processes on each machine, and the kind of device there.
    """
    answers = agents.ask([call(Agent.prepare, size, options.threads, options.device) for size in sizes], PREPARE_S)
    for link, size, answer in zip(agents.links, sizes, answers, strict=True):
        device, count = answer.device, answer.count
        if size > count and device not in {"cpu", "mps"}:
            raise UserError(
                f"{link.machine.name} has {count} {device} devices, but {size} processes are requested",
                "cluster.hosts",
                (f'write "{link.machine.target} slots={count}"', "or train on the CPU: --device cpu"),
            )
    counts = [size or answer.count for size, answer in zip(sizes, answers, strict=True)]
    return counts, [answer.device for answer in answers]
