"""Builds the ssh commands that start agents on other machines, and explains failures of ssh."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from manyhands.cluster.agents.early import AGENT, SAFE
from manyhands.cluster.hosts.inventory import Machine, in_brackets
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import RunError, UserError
from manyhands.core.timeouts import SSH_ALIVE_S, SSH_CONNECT_S

HAS_MANYHANDS = 'import importlib.util as u, sys; sys.exit(not u.find_spec("manyhands"))'
OWN = ".venv"  # the virtual environment in the work folder; used if this user owns it
NO_PYTHON = "manyhands: no python here has manyhands"


def ssh_arguments(options: ClusterOptions) -> list[str]:
    """Returns the command cluster.ssh with options that prevent prompts and hangs. Raises UserError if invalid."""
    try:
        words = shlex.split(options.ssh)
    except ValueError as error:
        hints = ("quote the command as in a shell",)
        raise UserError(f"cluster.ssh is not a valid command: {error}", "cluster.ssh", hints) from None
    if not words:
        hints = ('remove cluster.ssh, or set a command such as "ssh -F my_config"',)
        raise UserError("cluster.ssh is empty", "cluster.ssh", hints)
    settings = ("BatchMode=yes", f"ConnectTimeout={SSH_CONNECT_S}", f"ServerAliveInterval={SSH_ALIVE_S}",
                "ServerAliveCountMax=3")  # fmt: skip
    return [*words, "-T", *(word for setting in settings for word in ("-o", setting))]


def agent_command(machine: Machine, options: ClusterOptions, workdir: Path, words: Sequence[str] = AGENT) -> list[str]:
    """Returns the ssh command that runs Python with the arguments `words` on a machine, as `agent_script` does."""
    if machine.host.startswith("-"):
        raise UserError(f'"{machine.host}" is not a host', "cluster.hosts", ("write a name or an address",))
    # On one line, because a login shell such as csh accepts no line break in quotes.
    script = " ".join(agent_script(options, workdir, words).splitlines())
    return [*ssh_command(machine, options), f"exec sh -c {shlex.quote(script)}"]


def ssh_command(machine: Machine, options: ClusterOptions, *ssh_options: str) -> list[str]:
    """Returns the ssh command up to the host, with further `ssh_options`; callers append the remote command."""
    return [*ssh_arguments(options), *ssh_options, *ssh_port_option(machine), "--", machine.host]


def ssh_port_option(machine: Machine) -> list[str]:
    """Returns ssh's option for the machine's port; an empty list if the user's ssh configuration sets the port."""
    return ["-p", str(machine.port)] if machine.port else []


def ssh_prefix(machine: Machine, options: ClusterOptions) -> str:
    """Returns the ssh command to show in a hint before a command that the user should run on the machine."""
    return " ".join([options.ssh, *ssh_port_option(machine), machine.host])


def scp_command(machine: Machine, folder: str, to: str) -> str:
    """Returns the scp command, to show in a hint, that copies a folder from a machine to the local path `to`."""
    port = ["-P", str(machine.port)] if machine.port else []
    user = machine.host.removesuffix(machine.address)
    return shlex.join(["scp", "-r", *port, f"{user}{in_brackets(machine.address)}:{folder}", to])


def agent_script(options: ClusterOptions, workdir: Path, words: Sequence[str] = AGENT) -> str:
    """Returns a shell script that changes to the work folder and runs a Python that has manyhands, with `words`."""
    given = shlex.join(words)
    if options.workdir:
        enter = f"cd {_quoted(options.workdir)} || exit 126;"
    else:
        enter = f"cd {shlex.quote(str(workdir))} 2>/dev/null;"
    if options.python:
        return f"{enter}\nexec {_quoted(options.python)} {given}"
    return (
        f"{enter}\n"
        f"own=;\n"
        f"test -O {OWN} 2>/dev/null && test -O {OWN}/bin && own={OWN}/bin/python;\n"
        f"for python in {shlex.quote(sys.executable)} $own python3 python; do\n"
        f'  "$python" {SAFE} -c {shlex.quote(HAS_MANYHANDS)} 2>/dev/null && exec "$python" {given};\n'
        f"done;\n"
        f"echo {shlex.quote(NO_PYTHON)} >&2;\n"
        f"exit 127"
    )


def _quoted(path: str) -> str:
    """Quotes a path for the other machine's shell; ~/ becomes the home folder there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def explain_contact(machine: Machine, exit_code: int | None, stderr: str, options: ClusterOptions) -> RunError:
    """Returns the error that explains why a machine's agent did not answer.

    `stderr` is the end of ssh's standard error. `exit_code` is 255 for ssh's own failures, None while ssh runs.
    """
    name, reach = machine.name, ssh_prefix(machine, options)
    by_hand = f"test the connection: {reach} true"
    for words, what, hint in _known_problems(machine, options, reach):
        if any(word in stderr for word in words):
            # Words of Python show that the connection works.
            return RunError(what, name, (hint,) if NO_PYTHON in words or "ImportError" in words else (hint, by_hand))
    if exit_code == 126 and options.workdir:
        hint = f"create the folder: {reach} mkdir -p {options.workdir}, or change cluster.workdir"
        return RunError(f"{name} has no folder {options.workdir}", name, (hint,))
    if exit_code == 127 and options.python:
        hint = f"set the path of a Python on {name}: --cluster.python /path/to/{Path(sys.executable).name}"
        return RunError(f"{name} has no program {options.python}", name, (hint,))
    ended = "" if exit_code is None else f" (exit code {exit_code})"
    last = stderr.strip().rpartition("\n")[2].strip()
    return RunError(f"the agent on {name} does not respond{ended}{last and f': {last}'}", name, (by_hand,))


def _known_problems(machine: Machine, options: ClusterOptions, reach: str) -> list[tuple[tuple[str, ...], str, str]]:
    name, port = machine.name, " ".join(["", *ssh_port_option(machine)])
    known_as = shlex.quote(f"[{machine.address}]:{machine.port}") if machine.port else name
    return [
        (("Could not resolve hostname", "Name or service not known"),
         f"{name} can't be resolved to an address",
         f"write the address, or add {name} to ~/.ssh/config or /etc/hosts"),
        (("REMOTE HOST IDENTIFICATION HAS CHANGED", "Host key verification failed", "host key is known"),
         f"the ssh host key of {name} is unknown or has changed",
         f"check that {name} is the right machine, then run once: ssh-keygen -R {known_as}; {reach}"),
        (("Permission denied", "Too many authentication failures"),
         f"{name} does not allow ssh logins without a password",
         f"copy your ssh key: ssh-copy-id{port} {machine.host}"),
        (("Connection refused",), f"{name} refuses ssh connections",
         f"start the ssh server (sudo systemctl start ssh), or set the port: ssh://{machine.host}:PORT"),
        (("timed out", "No route to host", "Network is unreachable", "Host is down", "not responding"),
         f"{name} can't be reached", f"check that {name} is running, on this network, and has this address"),
        ((NO_PYTHON, "No module named manyhands", "No module named 'manyhands'"),
         f"{name} has no Python with manyhands{f' ({options.python})' if options.python else ''}",
         f"install manyhands on {name}, or set its Python: --cluster.python /path/to/{Path(sys.executable).name}"),
        (("ModuleNotFoundError", "ImportError"), f"manyhands can't be imported on {name}",
         f"log in ({reach}) and reinstall manyhands with its dependencies: pip install -e ."),
    ]  # fmt: skip
