"""manyhands clean."""

import shlex
from typing import Annotated

from cyclopts import Parameter

from manyhands.core.errors import EXIT_FAILED, EXIT_OK
from manyhands.core.terminal import say, show, show_json


def clean(
    *runs: Annotated[str, Parameter(help="runs to remove too: a folder, a name, the start of a name, or last")],
    yes: Annotated[bool, Parameter(negative="", help="remove the files; without --yes only print their sizes")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="print one JSON object")] = False,
) -> int:
    """List the disk space that old copies, caches and leftovers take; remove them with --yes, and runs by name."""
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
        show("nothing to clean")
    elif yes:
        show(f"{_size(total)} freed" if whole else "some files could not be removed")
    else:
        again = shlex.join(["manyhands", "clean", *runs, "--yes"])
        show(f"{_size(total)} can be freed; to remove the files, run {again}")
    return EXIT_OK if whole else EXIT_FAILED


def _size(count: int) -> str:
    for unit, bytes_in in (("GB", 1e9), ("MB", 1e6)):
        if count >= bytes_in:
            return f"{count / bytes_in:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
