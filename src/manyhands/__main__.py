"""python -m manyhands, which is also how torchrun starts it."""

import sys
from pathlib import Path

# `python -m` puts the current folder first on the path, where others may be able to write; what of it is the user's
# own code is named by its file, and found by that.
if not sys.flags.safe_path and sys.path and sys.path[0] == str(Path.cwd()):
    del sys.path[0]

from manyhands.cli.main import main

main()
