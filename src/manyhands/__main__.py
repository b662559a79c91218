"""python -m manyhands, which is also how torchrun starts it, and the script `manyhands`."""

import sys
from pathlib import Path


def start() -> None:
    """Runs the command. Ctrl-C while it is imported ends it without a word, since nothing has begun."""
    import signal

    from manyhands.core.early_agent import start_early

    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    start_early(sys.argv[1:])
    from manyhands.cli.main import main

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    # `python -m` puts the current folder first on the path, where others may be able to write; what of it is the
    # user's own code is named by its file, and found by that. Nothing that may lie there is imported before.
    if not sys.flags.safe_path and sys.path and sys.path[0] == str(Path.cwd()):
        del sys.path[0]
    start()
