"""Starts this machine's agent before the job is known, so that it imports torch while the head reads the job.

Nothing here imports anything of manyhands: it is the first thing that a command does.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence

# An agent that is told this word imports first, and then reads the path of its log, up to a NUL, from its input.
EARLY = "early"
# The folder that an agent works in is no place to import from; somebody else may write there.
SAFE = "-P"
AGENT = (SAFE, "-m", "manyhands.cluster.agents.agent")
# What tells a process that another program has started it: it trains itself, and has no agent.
_STARTED = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# With these words, or a script of the user's, nothing of ours is trained, or in this process.
_WITHOUT = ("-h", "--help", "--dry-run", "--show-config", "--init")

# Open files that a command and its agent need, and for each process; with 18 the agent hangs.
FILES, FILES_EACH = 48, 8

_untaken: list["subprocess.Popen[bytes]"] = []


def start_early(words: Sequence[str]) -> None:
    """Starts it where a command's words seem to be those of a run here; one that nobody takes costs a second."""
    trains = words[:1] == ["train"] and not any(name in os.environ for name in _STARTED)
    if not trains or any(word.endswith(".py") or word.partition("=")[0] in _WITHOUT for word in words):
        return
    if raise_file_limit(FILES + FILES_EACH) < FILES + FILES_EACH:
        return
    with contextlib.suppress(OSError):  # then it is started once the job is known, where the error is told
        _untaken.append(_start())


def raise_file_limit(needed: int) -> int:
    """Raises this process's limit on open files to `needed`, or as far as the system allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return needed if soft == resource.RLIM_INFINITY else soft


def _start() -> "subprocess.Popen[bytes]":
    pipe = subprocess.PIPE
    # Its words until it has a log, which it moves there; nothing of them is left where it is ended.
    words_fd = os.memfd_create(EARLY) if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
    # As in cluster/agents/start.py: a scheduler's word to all processes of a job isn't for agents.
    previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        command = [sys.executable, *AGENT, EARLY]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=words_fd, start_new_session=True)
    finally:
        signal.signal(signal.SIGUSR1, previous)
        os.close(words_fd)


def take_early() -> "subprocess.Popen[bytes] | None":
    """The agent that waits for its log's path; None where there is none."""
    early = _untaken.pop() if _untaken else None
    return early if early and early.poll() is None else None


def end_early() -> None:
    """Ends the one that nobody has taken: it has only imported."""
    while _untaken:
        with _untaken.pop() as early:
            early.kill()
