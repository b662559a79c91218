"""python -m manyhands, which is also how torchrun starts it, and the script `manyhands`."""

import _signal  # pyright: ignore[reportMissingImports] - what `signal` is made of, without enum
import sys

HANDLES_CTRL_C = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
# Ctrl-C while the command is imported ends it without a word, since nothing has begun; so this comes before all else.
if HANDLES_CTRL_C:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def start() -> None:
    """Runs the command."""
    from manyhands.cluster.agents.early import start_early

    start_early(sys.argv[1:])
    from manyhands.cli.main import main

    main(handles_ctrl_c=HANDLES_CTRL_C)


if __name__ == "__main__":
    # `python -m` puts the current folder first on the path, where others may be able to write; what of it is the
    # user's own code is named by its file, and found by that. Nothing that may lie there is imported before.
    import os

    if not sys.flags.safe_path and sys.path and sys.path[0] == os.getcwd():  # noqa: PTH109 - pathlib takes long to import
        del sys.path[0]
    start()
