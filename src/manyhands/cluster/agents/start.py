"""Opens the conversation with an agent: on this machine over a pipe, on another over ssh."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manyhands.cluster.agents.connection import AgentConnection
from manyhands.cluster.agents.early import AGENT, take_early
from manyhands.cluster.agents.ssh import agent_command
from manyhands.cluster.hosts.inventory import Machine
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import UserError
from manyhands.core.files import usual_umask


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
