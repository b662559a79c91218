"""Entry point of `python -m manyhands`, torchrun and the script `manyhands`."""

import _signal  # pyright: ignore[reportMissingImports] - what `signal` is made of, without enum
import sys

HANDLES_CTRL_C = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
# Ctrl-C during the imports ends the command without a traceback; therefore this precedes the other imports.
if HANDLES_CTRL_C:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def start() -> None:
    """Runs the command line in `sys.argv`."""
    from manyhands.cluster.agents.early import start_early_agent

    start_early_agent(sys.argv[1:])
    from manyhands.cli.main import main

    main(handles_ctrl_c=HANDLES_CTRL_C)


if __name__ == "__main__":
    # `python -m` puts the current folder first on sys.path, where other users may be able to write. User code is loaded
    # by file path and doesn't need that entry. No module that could lie in the folder is imported before this.
    import os

    if not sys.flags.safe_path and sys.path and sys.path[0] == os.getcwd():  # noqa: PTH109 - pathlib takes long to import
        del sys.path[0]
    start()
