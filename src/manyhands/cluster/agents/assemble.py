"""Starts the agents of a list of machines, and has them prepare for workers."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.connection import AgentConnection, LinkClosed, MisunderstoodError, ask_all, close_all
from manyhands.cluster.agents.early import AGENT, raise_file_limit, take_early, usr1_ignored
from manyhands.cluster.agents.machines import Machines, MachineState, RunMachine
from manyhands.cluster.agents.ssh import agent_command, explain_contact
from manyhands.cluster.doctor.findings import Contact, FactsWanted
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.hosts.this_process import is_here
from manyhands.cluster.messages import call
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import RunError, UserError
from manyhands.core.files import usual_umask
from manyhands.core.stops import ended_like_ctrl_c
from manyhands.core.timeouts import HELLO_EACH_S, HELLO_S, PREPARE_S

# Two pipes for each machine; one more while it is started, and those of the launcher itself.
FILES_EACH, OWN_FILES = 2, 200
# Agents are killed this long after a stop request while no worker runs.
STOPPED_S = 1.0


@contextmanager
def assembled(
    machines: Sequence[Machine],
    options: ClusterOptions,
    logs: Path,
    wanted: FactsWanted,
    on_stop: Callable[[], object] = lambda: None,
) -> Iterator[Machines]:
    """Starts an agent on each machine and asks it for its facts; ends all with the block.

    The agents' standard error goes to files in `logs`. `on_stop` is called if the user ends the block, before they end.
    """
    refuse_doubles(machines)
    allow_open_files(OWN_FILES + FILES_EACH * len(machines))
    found = Machines([])
    with ended_like_ctrl_c():
        try:
            for machine in machines:
                found.all.append(RunMachine(machine, link=open_agent(machine, options, logs)))
            _greet(found, options, wanted)
            yield found
        except KeyboardInterrupt:
            on_stop()
            found.close(STOPPED_S)  # ends the agents, whatever they are busy with
            raise
        finally:
            found.close()


def allow_open_files(count: int) -> None:
    """Raises this process's limit on open files. Raises UserError: the system's limit is lower."""
    if (most := raise_file_limit(count)) < count:
        what = f"the connections to the machines need {count:,} open files, but the limit for this user is {most:,}"
        raise UserError(what, "cluster.hosts", (f"raise the limit in a root shell: ulimit -Hn {count}",))


def refuse_doubles(machines: Sequence[Machine]) -> None:
    """Checks that the names of machines are unique. Raises UserError: a name occurs twice."""
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


def _open(command: list[str], machine: Machine, log: Path, *, here: bool) -> AgentConnection:
    log_start = log.stat().st_size if log.exists() else 0
    return AgentConnection(machine, _start(command, log), log, here=here, log_start=log_start)


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    pipe, mask = subprocess.PIPE, usual_umask()
    with log.open("ab") as output, usr1_ignored():
        try:
            # In a session of its own, so that Ctrl-C and the terminal's end reach only the launcher.
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=output, start_new_session=True, umask=mask)
        except OSError as error:
            what = f"{command[0]} can't be started: {error.strerror}"
            raise UserError(what, "cluster.ssh", ("set cluster.ssh to an installed ssh program",)) from None


def open_agent(machine: Machine, options: ClusterOptions, logs: Path) -> AgentConnection:
    """Starts the agent of one machine; the first request shows whether that works."""
    if is_here(machine):
        return open_here(logs / "agent.log", machine)
    log = logs / f"agent@{machine.name}.log"
    link = _open(agent_command(machine, options, Path.cwd()), machine, log, here=False)
    link.connect_again = lambda words: _start(agent_command(machine, options, Path.cwd(), words), log)
    return link


def _greet(machines: Machines, options: ClusterOptions, wanted: FactsWanted) -> None:
    """Asks all agents for their facts; machines that answer take part, the others have a `problem`."""
    asked, links = time.time(), {machine.agent: machine for machine in machines.all}
    requests = {link: call(Agent.hello, wanted, not link.here) for link in links}
    answers = ask_all(requests, HELLO_S + HELLO_EACH_S * len(links))
    close_all([link for link, answer in answers.items() if isinstance(answer, LinkClosed)])
    for link, machine in links.items():
        answer = answers[link]
        if isinstance(answer, LinkClosed):
            machine.problem = explain_contact(machine.spec, link.close(), link.log_tail(), options)
        elif isinstance(answer, MisunderstoodError):
            machine.problem = Contact("other-version", answer.message, answer.hints)
        elif isinstance(answer, RunError):
            raise answer
        else:
            machine.state, machine.facts = MachineState.RUNNING, answer
            link.clock_offset_s = clock_offset(answer.get("time", 0.0), asked)
    for machine in machines.waiting:
        machine.lose()


def clock_offset(there: float, asked: float) -> float:
    """Returns for how many seconds a clock is ahead at least, since it was asked at our time `asked`."""
    now = time.time()
    return there - now if there > now else there - asked if there < asked else 0.0


def prepare(machines: Machines, options: ClusterOptions, processes: int | None = None) -> None:
    """Has the machines import torch, and notes the kind of device and the number of processes of each.

    `processes` on each machine; None: as many as its slots, or as it has devices. Raises UserError: it has fewer.
    """
    sizes = {machine: machine.spec.slots if processes is None else processes for machine in machines.running}
    requests = {machine: call(Agent.prepare, size, options.threads, options.device) for machine, size in sizes.items()}
    for machine, answer in machines.ask(requests, PREPARE_S).items():
        size, device, count = sizes[machine], answer.device, answer.count
        if size > count and device not in {"cpu", "mps"}:
            what = f"{machine.name} has {count} {device} devices, but {size} processes are requested"
            hints = (f'write "{machine.spec.target} slots={count}"', "or train on the CPU: --device cpu")
            raise UserError(what, "cluster.hosts", hints)
        machine.device, machine.processes = device, size or count
