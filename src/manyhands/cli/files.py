"""The commands for files on disk: checkpoint, pack and clean."""

import shlex
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts

from manyhands.cli.flags import Help, Int, Json
from manyhands.cli.printing import align, print_answer, size_text
from manyhands.core.errors import EXIT_FAILED, EXIT_OK
from manyhands.core.terminal import plain, say, show, show_json

Source = Annotated[
    str,
    Help("a run (folder, part of its name, or last), a checkpoint, or a .pth.tar, .pth, .pt or .safetensors file")
]  # fmt: skip
Target = Annotated[Path, Help("checkpoint folder to create")]
MergeTarget = Annotated[
    Path, Help("checkpoint folder to create, or a .safetensors, .pth or .pt file to create with the weights only")
]
Plan = Annotated[Path, Help("plan.json that defines the mesh and the sharding of each tensor")]
Which = Annotated[Literal["best", "last"], Help("the checkpoint to use if SRC is not itself a checkpoint")]

checkpoint = cyclopts.App(
    name="checkpoint",
    help="Inspect, merge and reshard checkpoints.",
    help_format="plaintext",
    result_action="return_value",
)


@checkpoint.command
def info(src: Source, /, *, which: Which = "last", as_json: Json = False) -> int:
    """Print the format, step and mesh of a checkpoint, and the shape, dtype, size and sharding of each tensor."""
    from manyhands.run import registry, tasks

    found = tasks.describe_checkpoint(registry.find_reference(src), which=which)
    if as_json:
        show_json(found)
        return 0
    sizes: dict[str, int] = found["mesh"] or {}
    mesh = ",".join(f"{name}={size}" for name, size in sizes.items())
    over, step = f" over {mesh}" if mesh else "", "" if found["step"] is None else f"   step {found['step']}"
    lines = [f"{found['checkpoint']}   {found['format']}{over}{step}"]
    for kind in ("model", "optimizer"):
        if kind in found:
            lines += ["", f"{kind}: {len(found[kind])} tensors, {size_text(found['size_bytes'][kind])}"]
            lines += [f"  {line}" for line in align([_tensor_row(name, entry) for name, entry in found[kind].items()])]
    show(map(plain, [*lines, *(f"note: {note}" for note in found["notes"])]))
    return 0


def _tensor_row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    shape, view = ("x".join(map(str, entry[key])) or "scalar" for key in ("shape", "view"))
    cuts = " ".join(f"{dim}@{','.join(axes)}" for dim, axes in entry["cuts"].items())
    as_view = f"as {view}: " if shape != view else ""
    return (name, shape, entry["dtype"], size_text(entry["size_bytes"]), as_view + cuts if cuts else "unsharded")


@checkpoint.command
def merge(src: Source, dst: MergeTarget, /, *, which: Which = "best") -> int:
    """Write a checkpoint unsharded, as a folder or one file."""
    return _rewrite_checkpoint(src, dst, None, which)


@checkpoint.command
def split(src: Source, dst: Target, /, *, plan: Plan, which: Which = "last") -> int:
    """Shard an unsharded checkpoint or weights file as a plan specifies."""
    return _rewrite_checkpoint(src, dst, plan, which)


checkpoint.command(split, name="reshard", help="Reshard a checkpoint for another plan or number of processes.")


def _rewrite_checkpoint(src: str, dst: Path, plan: Path | None, which: str) -> int:
    from manyhands.run import registry, tasks

    for note in tasks.rewrite_checkpoint(registry.find_reference(src), dst, plan=plan, which=which):
        say(plain(note), "note")
    say(f"wrote {dst}")
    return 0


def pack(  # noqa: PLR0913 - one argument for each flag
    folder: Annotated[Path, Help("folder of class folders, or folder with train/ and val/")],
    /,
    *,
    size: Annotated[Int, Help("shrink pictures so that the shorter side has this many pixels; 0: no change")] = 0,
    quality: Annotated[Int, Help("JPEG quality of pictures that --size shrinks, from 1 to 95; 0: 90")] = 0,
    to: Annotated[Path | None, Help("folder to write; default: FOLDER.pack, where train looks for it")] = None,
    processes: Annotated[Int, Help("number of packing processes; 0: one per CPU core")] = 0,
    check: Annotated[bool, Help("do not pack, but verify the checksums of an existing packed copy")] = False,
    replace: Annotated[bool, Help("overwrite an existing packed copy")] = False,
    as_json: Json = False,
) -> int:
    """Pack a folder of pictures into tar files, which train then reads in place of the pictures.

    To resume an interrupted pack, run the same command again.
    """
    from manyhands.run import disk

    folder, to = folder.expanduser(), to and to.expanduser()
    request = None if check else disk.create_pack_request(folder, to, size, quality)
    began = reported = time.perf_counter()

    def say_progress(done: int, total: int) -> None:
        nonlocal reported
        if time.perf_counter() - reported > 5:
            reported = time.perf_counter()
            say(f"{done:,} of {total:,} {'shard' if total == 1 else 'shards'}")

    bad = None
    if request:
        found, bad = disk.pack(request, processes=processes, replaced=replace, progress=say_progress)
    else:
        found = disk.check_pack(folder, to)
    pictures, shards = len(found.names), len(found.shards)
    of_shards = f"{shards:,} {'shard' if shards == 1 else 'shards'}"
    counts = f"{pictures:,} pictures in {of_shards}, {size_text(found.size_bytes)}"
    content: dict[str, Any] = {"pack": str(found.folder), "pictures": pictures, "shards": shards}
    content |= {"bytes": found.size_bytes, "digest": found.digest}
    if request:
        content |= {"made": bad is not None, "bad": bad or ()}
        how = " is up to date" if bad is None else f", in {time.perf_counter() - began:.1f} s"
        lines = [f"{counts}: {found.folder}{how}"]
        if bad:
            some = f"{', '.join(bad[:3])}{' …' if len(bad) > 3 else ''}"
            lines.append(f"{len(bad):,} of {pictures:,} pictures can't be read: {some}")
            lines.append(
                "repair or remove these pictures and pack again, or train with --data.skip-corrupt to skip them"
            )
        lines.append(f"to train on the copy: manyhands train {shlex.quote(str(folder if to is None else to))}")
    else:
        lines = [f"{found.folder} is intact: {counts}"]
    print_answer(content, lines, json=as_json)
    return 0


def clean(
    *runs: Annotated[str, Help("runs to remove as well: a folder, a name, the start of a name, or last")],
    yes: Annotated[bool, Help("remove the files; without --yes, only print their sizes")] = False,
    as_json: Json = False,
) -> int:
    """List old copies, caches and leftovers with their sizes; remove them, and runs given by name, with --yes."""
    from manyhands.run import disk

    found, kept = disk.find_leftovers(runs)
    total = sum(leftover.size_bytes for leftover in found)
    if not as_json:
        for leftover in found:
            count = f"{len(leftover.paths)}  " if leftover.kind != "run" else ""
            show(f"{size_text(leftover.size_bytes):>9}  {count}{leftover.what}")
        for line in kept:
            show(f"     kept  {line}")
    complete = disk.remove(found, say) if yes else True
    if as_json:
        content = {
            leftover.kind: {"paths": [str(path) for path in leftover.paths], "bytes": leftover.size_bytes}
            for leftover in found
            if leftover.kind != "run"
        }
        named = [str(path) for leftover in found if leftover.kind == "run" for path in leftover.paths]
        show_json({"found": content, "runs": named, "kept": kept, "bytes": total, "removed": yes and complete})
    elif not found:
        show("nothing to clean")
    elif yes:
        show(f"{size_text(total)} freed" if complete else "some files could not be removed")
    else:
        again = shlex.join(["manyhands", "clean", *runs, "--yes"])
        show(f"{size_text(total)} can be freed; to remove the files, run {again}")
    return EXIT_OK if complete else EXIT_FAILED
