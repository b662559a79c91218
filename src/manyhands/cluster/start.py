"""Opens the conversation with an agent: on this machine over a pipe, on another over ssh."""

import subprocess
import sys
from pathlib import Path

from manyhands.cluster.inventory import Machine
from manyhands.cluster.link import Link
from manyhands.cluster.ssh import AGENT, agent_command
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import UserError


def open_here(log: Path, machine: Machine | None = None) -> Link:
    """Starts an agent on this machine."""
    return _open([sys.executable, *AGENT], machine or Machine("localhost"), log, here=True)


def open_there(machine: Machine, options: ClusterOptions, log: Path) -> Link:
    """Starts an agent on another machine over ssh; whether that works shows when it is first asked."""
    return _open(agent_command(machine, options, Path.cwd()), machine, log, here=False)


def _open(command: list[str], machine: Machine, log: Path, *, here: bool) -> Link:
    """In a session of its own, so that Ctrl-C and the terminal's end reach only the head."""
    with log.open("ab") as output:
        start = output.tell()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True
            )
        except OSError as error:
            what = f"{command[0]} can't be started: {error.strerror}"
            raise UserError(what, "cluster.ssh", ("name the ssh program that is installed here",)) from None
    return Link(machine, process, log, here=here, log_start=start)
