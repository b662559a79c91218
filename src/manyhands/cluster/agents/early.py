"""Starts this machine's agent before the command reads the job, so that the agent imports torch meanwhile.

Imports no other module of manyhands, because a command runs this module first.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence

EARLY = "early"  # argument of an agent that imports torch, and then reads the path of its log from its input
SAFE = "-P"  # keeps Python from importing from the working folder, where others may write
AGENT = (SAFE, "-m", "manyhands.cluster.agents.agent")
# Variables of launchers, whose processes train without an agent.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# Arguments of commands that don't train, or that train in their own process.
_WITHOUT_AGENT = ("-h", "--help", "--dry-run", "--show-config", "--init")

FILES, FILES_EACH = 48, 8  # open files of a command with its agent (18 are too few), and of each worker

_unused_agents: list["subprocess.Popen[bytes]"] = []


def start_early_agent(arguments: Sequence[str]) -> None:
    """Starts an agent if the command's arguments look like training on this machine. Unused, it costs a second."""
    trains = arguments[:1] == ["train"] and not any(name in os.environ for name in _RANK_VARIABLES)
    if not trains or any(word.endswith(".py") or word.partition("=")[0] in _WITHOUT_AGENT for word in arguments):
        return
    if raise_file_limit(FILES + FILES_EACH) < FILES + FILES_EACH:
        return
    pipe = subprocess.PIPE
    with contextlib.suppress(OSError), usr1_ignored():  # a later start reports the error
        # Collects the agent's output until it knows its log, and copies the output there.
        words_fd = os.memfd_create(EARLY) if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
        with os.fdopen(words_fd, "wb") as words:
            command = [sys.executable, *AGENT, EARLY]
            agent = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=words, start_new_session=True)
        _unused_agents.append(agent)


def raise_file_limit(needed: int) -> int:
    """Increases this process's limit of open files to `needed`; returns the new limit, or a lower hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed > hard != resource.RLIM_INFINITY:
        return hard
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return needed


@contextlib.contextmanager
def usr1_ignored() -> Generator[None]:
    """Makes processes that are started in the block ignore SIGUSR1, which schedulers send to all processes of a job."""
    previous = None
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGUSR1, previous)


def take_early_agent() -> "subprocess.Popen[bytes] | None":
    """Returns the agent that `start_early_agent` started, or None. The agent waits for its log's path on stdin."""
    early = _unused_agents.pop() if _unused_agents else None
    return early if early and early.poll() is None else None


def kill_unused_agent() -> None:
    while _unused_agents:
        with _unused_agents.pop() as early:
            early.kill()
