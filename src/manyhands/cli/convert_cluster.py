"""manyhands convert-cluster."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.core.errors import UserError


def convert_cluster(
    file: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="a description of a cluster; - reads from standard input")
    ],
    /,
    *,
    to: Annotated[str, Parameter(help="rank_table, hostfile, torchrun, msrun, accelerate, slurm, launch.json …")],
    from_: Annotated[str, Parameter(name="--from", help="the file's format; default: found by its content")] = "",
    out: Annotated[str, Parameter(help="a new file to write; default: standard output")] = "",
) -> int:
    """Write a description of a cluster in another format."""
    from manyhands.cluster.describe import format_named, format_of, read_text

    target = format_named(to, "write", "--to")
    if file == "-":
        name, text = "standard input", sys.stdin.read()
    else:
        name, text = file, read_text(Path(file))
    source = format_named(from_, "read", "--from") if from_ else format_of(name, text)
    kept, notes = _fitted(target, source.read(text, name))
    written = target.write(kept)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    _deliver(written, out)
    return 0


def _fitted(target: Any, cluster: Any) -> tuple[Any, list[str]]:
    """What of the cluster the format can hold, and what is left out."""
    return target.fit(cluster) if hasattr(target, "fit") else (cluster, [])


def _deliver(text: str, out: str) -> None:
    if not out:
        sys.stdout.write(text)
        return
    try:
        with Path(out).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{out} is there already", "--out", ("choose another name, or remove it first",)) from error
    except OSError as error:
        raise UserError(f"{out} can't be written: {error.strerror}", "--out", ("choose another place",)) from error
    sys.stderr.write(f"wrote {out}\n")
