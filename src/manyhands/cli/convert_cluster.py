"""manyhands convert-cluster."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.core.errors import UserError
from manyhands.core.outside import MOST_TEXT_BYTES
from manyhands.core.shown import plain, say, show


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
    from manyhands.cluster.descriptions.recognise import format_named, format_of, read_text, text_from

    target = format_named(to, "write", "--to")
    if file == "-":
        name, text = "standard input", text_from(sys.stdin.buffer.read(MOST_TEXT_BYTES + 1), "standard input")
    else:
        name, text = file, read_text(Path(file))
    source = format_named(from_, "read", "--from") if from_ else format_of(name, text)
    kept, notes = _fitted(target, source.read(text, name))
    written = target.write(kept)
    for note in notes:
        say(plain(note), "note")
    _deliver(written, out)
    return 0


def _fitted(target: Any, cluster: Any) -> tuple[Any, list[str]]:
    """What of the cluster the format can hold, and what is left out."""
    from manyhands.cluster.descriptions.holding import without_ports

    left_out: list[str] = []
    if not hasattr(target, "HAS_SSH_PORTS"):
        cluster, left_out = without_ports(cluster)
    if not hasattr(target, "fit"):
        return cluster, left_out
    kept, notes = target.fit(cluster)
    return kept, [*left_out, *notes]


def _deliver(text: str, out: str) -> None:
    if not out:
        show(text)
        return
    try:
        with Path(out).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{out} is there already", "--out", ("choose another name, or remove it first",)) from error
    except OSError as error:
        raise UserError(f"{out} can't be written: {error.strerror}", "--out", ("choose another place",)) from error
    say(f"wrote {out}")
