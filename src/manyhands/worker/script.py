"""Runs a user's training script in a worker as torchrun does: `python -m manyhands.worker.script …`.

The agent has set torchrun's environment variables. A failure is recorded, so that the first cause is known.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

from manyhands.cluster.agents.worker_start import begin_process, wait_for_debugger
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import EXIT_FAILED, EXIT_USAGE, ManyhandsError, UserError
from manyhands.core.records import FAILURE_FILE, write_json
from manyhands.core.terminal import say
from manyhands.parallel.group.tunnel_ends import tunnel_ends


def main(words: list[str]) -> None:
    """Runs the user's script. `words`: the agent's folders and process id, debug rank and port, script, arguments."""
    scratch, logs, agent, debug_rank, debug_port, script, *own = words
    rank = begin_process(scratch, logs, int(agent))
    try:
        debugged = ClusterOptions(debug_rank=int(debug_rank), debug_port=int(debug_port))
        wait_for_debugger(rank, int(os.environ["WORLD_SIZE"]), debugged)
        _run_script(script, own)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ended the script is the first cause
        if isinstance(error, ManyhandsError) and error.__cause__ is None:
            say(str(error))
        else:
            traceback.print_exc()
        path = Path(os.environ[FAILURE_FILE])
        if not path.exists():  # else `manyhands.fit` in the script wrote it
            from manyhands.worker.failure import describe_failure

            write_json(path, describe_failure(error, rank=rank, step=None, phase="script"))
        sys.exit(EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILED)


def _run_script(script: str, arguments: list[str]) -> None:
    if not Path(script).is_file():
        here = f"{os.uname().nodename}:{Path.cwd()}"
        hints = ("copy this folder to the other machines: --sync-code", "or copy the script by hand")
        raise UserError(f"{script} doesn't exist", here, hints)
    if tunnel_ends():
        from manyhands.parallel.group.through_ssh import route_gloo_through_tunnels

        route_gloo_through_tunnels()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    # The threads of an open process group sometimes abort the process at exit.
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
