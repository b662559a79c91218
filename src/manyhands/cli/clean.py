"""manyhands clean."""

import shlex
from typing import Annotated

from cyclopts import Parameter

from manyhands.core.errors import EXIT_FAILED, EXIT_OK
from manyhands.core.shown import say, show, show_json


def clean(
    *runs: Annotated[str, Parameter(help="runs to remove too: a folder, its name, the beginning of that, or last")],
    yes: Annotated[bool, Parameter(negative="", help="remove it; without, only say what would be freed")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="one JSON object on stdout")] = False,
) -> int:
    """Say what old copies, caches and leftovers take on this machine, and with --yes remove them; runs only by name."""
    from manyhands.run.clean import find_leftovers, remove

    found, kept = find_leftovers(runs)
    total = sum(leftover.size_bytes for leftover in found)
    if not as_json:
        for leftover in found:
            count = f"{len(leftover.paths)}  " if leftover.kind != "run" else ""
            show(f"{_size(leftover.size_bytes):>9}  {count}{leftover.what}")
        for line in kept:
            show(f"     kept  {line}")
    whole = remove(found, say) if yes else True
    if as_json:
        content = {
            leftover.kind: {"paths": [str(path) for path in leftover.paths], "bytes": leftover.size_bytes}
            for leftover in found
            if leftover.kind != "run"
        }
        named = [str(path) for leftover in found if leftover.kind == "run" for path in leftover.paths]
        show_json({"found": content, "runs": named, "kept": kept, "bytes": total, "removed": yes and whole})
    elif not found:
        show("there is nothing to clean")
    elif yes:
        show(f"{_size(total)} freed" if whole else "not all of it could be removed")
    else:
        again = shlex.join(["manyhands", "clean", *runs, "--yes"])
        show(f"{_size(total)} would be freed; nothing is removed yet: {again}")
    return EXIT_OK if whole else EXIT_FAILED


def _size(count: int) -> str:
    for unit, bytes_in in (("GB", 1e9), ("MB", 1e6)):
        if count >= bytes_in:
            return f"{count / bytes_in:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
