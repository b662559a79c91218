"""manyhands checkpoint."""

from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import Parameter

from manyhands.core.terminal import plain, say, show, show_json

Source = Annotated[
    str,
    Parameter(help="a run (folder, part of its name, last), a checkpoint, a .pth.tar, .pth, .pt or .safetensors file"),
]  # fmt: skip
Target = Annotated[Path, Parameter(help="a new checkpoint folder")]
MergeTarget = Annotated[
    Path, Parameter(help="a new checkpoint folder, or a new .safetensors, .pth or .pt file for the weights alone")
]
Plan = Annotated[Path, Parameter(help="a plan.json with the mesh and the layout of each sharded tensor")]
Which = Annotated[Literal["best", "last"], Parameter(help="the checkpoint to use if SRC is a run")]

checkpoint = cyclopts.App(name="checkpoint", help_format="plaintext", result_action="return_value")


@checkpoint.command
def info(
    src: Source,
    /,
    *,
    which: Which = "last",
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="print one JSON object")] = False,
) -> int:
    """Print the format, step and mesh of a checkpoint, and the shape, dtype, size and sharding of each tensor."""
    from manyhands.run.find import find_reference
    from manyhands.run.tasks import describe_checkpoint

    found = describe_checkpoint(find_reference(src), which=which)
    if as_json:
        show_json(found)
        return 0
    show(map(plain, _lines(found)))
    return 0


@checkpoint.command
def merge(src: Source, dst: MergeTarget, /, *, which: Which = "best") -> int:
    """Write a checkpoint unsharded, as a folder or one file."""
    from manyhands.run.find import find_reference
    from manyhands.run.tasks import rewrite_checkpoint

    return _done(dst, rewrite_checkpoint(find_reference(src), dst, which=which))


@checkpoint.command
def split(src: Source, dst: Target, /, *, plan: Plan, which: Which = "last") -> int:
    """Shard an unsharded checkpoint or file by a plan."""
    from manyhands.run.find import find_reference
    from manyhands.run.tasks import rewrite_checkpoint

    return _done(dst, rewrite_checkpoint(find_reference(src), dst, which=which, plan=plan))


@checkpoint.command
def reshard(src: Source, dst: Target, /, *, plan: Plan, which: Which = "last") -> int:
    """Reshard a checkpoint for another plan or number of processes."""
    return split(src, dst, plan=plan, which=which)


def _done(dst: Path, notes: tuple[str, ...]) -> int:
    for note in notes:
        say(plain(note), "note")
    say(f"wrote {dst}")
    return 0


def _lines(found: dict[str, Any]) -> list[str]:
    sizes: dict[str, int] = found["mesh"] or {}
    mesh = ",".join(f"{name}={size}" for name, size in sizes.items())
    lines = [
        f"{found['checkpoint']}   {found['format']}"
        + (f" over {mesh}" if mesh else "")
        + (f"   step {found['step']}" if found["step"] is not None else "")
    ]
    for kind in ("model", "optimizer"):
        if kind in found:
            lines += ["", f"{kind}: {len(found[kind])} tensors, {_size(found['size_bytes'][kind])}"]
            lines += _table([_row(name, entry) for name, entry in found[kind].items()])
    return lines + [f"note: {note}" for note in found["notes"]]


def _row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    shape, view = ("x".join(map(str, entry[key])) or "scalar" for key in ("shape", "view"))
    cuts = " ".join(f"{dim}@{','.join(axes)}" for dim, axes in entry["cuts"].items())
    as_view = f"as {view}: " if cuts and shape != view else ""
    return (name, shape, entry["dtype"], _size(entry["size_bytes"]), as_view + cuts if cuts else "unsharded")


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
