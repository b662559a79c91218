"""Runs one rank under debugpy, for an editor to attach to.

A process at a breakpoint looks stalled, so a run with `cluster.debug_rank` has neither stall detection nor recovery,
and its collectives don't time out.
"""

import importlib.util
import json

from manyhands.config.job import ClusterOptions
from manyhands.core.errors import UserError
from manyhands.core.terminal import say

HOST = "127.0.0.1"


def attach_notice(options: ClusterOptions) -> str:
    """The message shown before an editor attaches: the entry for launch.json, and the exposure of the port."""
    rank, port = options.debug_rank, options.debug_port
    entry = {
        "name": f"manyhands rank {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": HOST, "port": port},
        "justMyCode": False,
    }
    return (
        f"rank {rank} waits for a debugger on port {port} of its machine ({HOST}); "
        "every user of that machine can run code as you by connecting to it\n"
        f"add this entry to the configurations in VS Code's launch.json:\n{json.dumps(entry, indent=2)}\n"
        f"if the rank runs on another machine, first run: ssh -L {port}:{HOST}:{port} MACHINE\n"
        "stall detection, collective timeouts and recovery are off for this run"
    )


def wait_for_editor(rank: int, size: int, options: ClusterOptions) -> None:
    """On the rank to debug, prints how to attach and waits for an editor; does nothing on the other ranks.

    Raises:
        UserError: the run of `size` ranks has no such rank, debugpy is missing, or the port is in use.
    """
    if options.debug_rank >= size:
        message = f"there is no rank {options.debug_rank} to debug: the ranks are 0 … {size - 1}"
        raise UserError(message, "--debug-rank", ("ranks start at 0",))
    if rank != options.debug_rank:
        return
    if importlib.util.find_spec("debugpy") is None:
        hints = (f"on the machine of rank {rank}, run: pip install 'manyhands[debug]'",)
        raise UserError(f"rank {rank} can't be debugged: debugpy is not installed", "--debug-rank", hints)
    import debugpy  # pyright: ignore[reportMissingTypeStubs]

    debugpy.configure(subProcess=False)
    try:
        debugpy.listen((HOST, options.debug_port))
    except RuntimeError as error:
        hints = (f"choose another port: --cluster.debug-port {options.debug_port + 1}",)
        message = f"rank {rank} can't be debugged on {HOST} port {options.debug_port}: {error}"
        raise UserError(message, "cluster.debug_port", hints) from error
    say(attach_notice(options))
    debugpy.wait_for_client()
