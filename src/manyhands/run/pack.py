"""Makes a packed copy of a folder of pictures, or checks one."""

import shlex
from collections.abc import Callable
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.core.machine import cores
from manyhands.core.stops import ended_like_ctrl_c
from manyhands.data.listed import place_of_pack
from manyhands.data.packed import PackedSet, altered, altered_shards, is_pack, open_pack
from manyhands.data.packing import PackRequest, is_up_to_date, make_pack, read_contents

USUAL_QUALITY, MOST_QUALITY = 90, 95


def request_of(root: Path, target: Path | None, size: int, quality: int) -> PackRequest:
    """Raises UserError: the folder isn't there, or is a packed copy itself."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}", str(root), ("name a folder of class folders",))
    if is_pack(root):
        raise UserError(f"{root} is already a packed copy", "", (f"run manyhands train {shlex.quote(str(root))}",))
    if size < 0 or not 0 <= quality <= MOST_QUALITY or (quality and not size):
        hints = (f"use a --size in pixels, such as 256; --quality (1 to {MOST_QUALITY}) requires --size",)
        raise UserError(f"--size {size} with --quality {quality} is not valid", "--size", hints)
    target = target or place_of_pack(root)
    if target.resolve().is_relative_to(root.resolve()):
        hints = ("name a folder outside with --to, or remove --to",)
        raise UserError("the packed copy would be inside the folder of pictures", str(target), hints)
    return PackRequest(root, target, size, (quality or USUAL_QUALITY) if size else 0)


def pack(
    request: PackRequest, *, processes: int = 0, replaced: bool = False, progress: Callable[[int, int], None]
) -> tuple[PackedSet, tuple[str, ...] | None]:
    """Packs a folder, or resumes an interrupted call.

    Returns:
        The pack, and the pictures in it that can't be read; None in place of these if it was up to date already.

    Raises:
        ManyhandsError: the folder can't be used, there is another pack, or the disk can't be written.
    """
    contents = read_contents(request.root)
    if not replaced and is_up_to_date(contents, request):
        return open_pack(request.target), None
    processes = processes or max(1, int(cores()))
    with ended_like_ctrl_c():
        return make_pack(contents, request, processes=processes, replace=replaced, progress=progress)


def check_pack(folder: Path, target: Path | None) -> PackedSet:
    """Reads all of a pack, named itself or by its folder. Raises UserError: there is none, or it was altered."""
    place = target or (folder if is_pack(folder) else place_of_pack(folder))
    if not is_pack(place):
        raise UserError(f"there is no packed copy at {place}", str(place), ("run manyhands pack FOLDER",))
    pack = open_pack(place)
    bad = altered_shards(pack)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise altered(place / bad[0], f"{bad[0]}{more} changed after packing")
    return pack
