"""Packs folders of pictures into tar files; finds and deletes files that are no longer needed, such as caches."""

import os
import re
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import Timeout
from platformdirs import user_cache_path

from manyhands.cluster.agents.folders import claim_run_folder
from manyhands.core import machine, stops
from manyhands.core.errors import UserError
from manyhands.core.scratch import PREFIX, abandoned
from manyhands.data import packed, packing
from manyhands.data.folder import pack_path
from manyhands.data.options import cache_folder
from manyhands.run.registry import find_run, list_active_runs

USUAL_QUALITY, MOST_QUALITY = 90, 95  # of JPEG
_CACHES = {
    "compiled": "compiled networks, compiled again when needed",
    "decoded": "decoded pictures, decoded again when needed",
    "unpacked": "unpacked archives, unpacked again when needed",
}
_MADE_BY_US = re.compile(rf"{PREFIX}(agent|doctor|logs|git|probe|objects|private)-\w+")


@dataclass(frozen=True)
class Leftover:
    """Removable files and folders of one kind, such as cached pictures."""

    kind: str  # "code", "compiled", "decoded", "unpacked", "parts", "temporary" or "run"
    what: str  # a description for the user
    paths: tuple[Path, ...]
    size_bytes: int


def find_leftovers(runs: Sequence[str] = ()) -> tuple[list[Leftover], list[str]]:
    """Finds removable files of this user: caches, files of killed processes, and the runs named in `runs`.

    Returns (removable files, descriptions of files in use). Raises UserError if a name matches no run or an active run.
    """
    active = [process for process in psutil.process_iter(["cmdline", "cwd", "uids"]) if _is_manyhands_process(process)]
    places = [Path(process.info["cwd"]) for process in active if process.info["cwd"]]
    cache, copies = cache_folder(), set(_owned_paths((user_cache_path("manyhands") / "code").glob("*")))
    used = {copy for copy in copies if any(place.is_relative_to(copy) for place in places)}
    kept = [f"copies of code that processes use now: {len(used)}"] if used else []
    made = {kind: list(_owned_paths((cache / kind).glob("*"))) for kind in _CACHES}
    if any(made.values()) and (active or list_active_runs()):
        made = {}
        kept.append("compiled networks, decoded pictures and unpacked archives, which your processes may be using")
    parts = [p for p in _owned_paths(cache.rglob(".*.part"), old=True) if p.is_file() and not p.is_symlink()]
    there = _owned_paths(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"), old=True)
    ours = [path for path in there if _MADE_BY_US.fullmatch(path.name) and not path.is_symlink()]
    unlocked = [path for path in ours if path.is_dir() and not any(path.glob(".alive"))]
    table = [
        ("code", "copies of code made by launch --sync-code", copies - used),
        *((kind, what, made.get(kind, ())) for kind, what in _CACHES.items()),
        ("parts", "incomplete files of ended processes", parts),
        ("temporary", f"temporary folders of killed processes in {tempfile.gettempdir()}", {*abandoned(), *unlocked}),
        *(("run", f"the run {path}", [path]) for path in map(_find_removable_run, runs)),
    ]
    listed = [(kind, what, tuple(sorted(paths))) for kind, what, paths in table]
    return [Leftover(kind, what, paths, sum(map(_disk_usage, paths))) for kind, what, paths in listed if paths], kept


def remove(leftovers: Iterable[Leftover], say: Callable[[str], object]) -> bool:
    """Deletes the files of `leftovers`; reports each failure with `say`. Returns True if all files were deleted."""
    complete = True
    for path in [path for leftover in leftovers for path in leftover.paths]:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            complete = False
            say(f"{path} can't be removed: {error.strerror or error}")
    return complete


def _owned_paths(paths: Iterable[Path], *, old: bool = False) -> Iterator[Path]:
    """Yields the paths that this user owns; with `old`, only paths last modified more than a day ago."""
    for path in paths:
        with suppress(OSError):
            state = path.lstat()
            if state.st_uid == os.getuid() and (not old or time.time() - state.st_mtime > 24 * 3600):
                yield path


def _find_removable_run(word: str) -> Path:
    folder = find_run(word, parts=False)
    try:
        lock = claim_run_folder(folder)
    except Timeout:
        hints = (f"stop the run: manyhands stop {shlex.quote(word)}", "or wait until the run ends")
        raise UserError("an active run can't be removed", str(folder.path), hints) from None
    if lock:
        lock.release()
    return folder.path


def _is_manyhands_process(process: psutil.Process) -> bool:
    uids, words = process.info["uids"], process.info["cmdline"] or ()
    own = uids is not None and uids.real == os.getuid() and process.pid != os.getpid()
    return own and any("manyhands" in word for word in words)


def _disk_usage(path: Path) -> int:
    """Returns the disk usage of a file or folder in bytes, without following symbolic links."""
    with suppress(OSError):
        state = path.lstat()
        own = state.st_blocks * 512
        if not stat.S_ISDIR(state.st_mode):
            return own
        return own + sum(_disk_usage(Path(entry.path)) for entry in os.scandir(path))
    return 0


def create_pack_request(root: Path, target: Path | None, size: int, quality: int) -> packing.PackRequest:
    if not root.is_dir():
        raise UserError(f"there is no folder {root}", str(root), ("use a folder with one folder per class",))
    if packed.is_pack(root):
        raise UserError(f"{root} is already a packed copy", "", (f"run manyhands train {shlex.quote(str(root))}",))
    if size < 0 or not 0 <= quality <= MOST_QUALITY or (quality and not size):
        hints = (f"use a --size in pixels, such as 256; --quality (1 to {MOST_QUALITY}) requires --size",)
        raise UserError(f"--size {size} with --quality {quality} is not valid", "--size", hints)
    target = target or pack_path(root)
    if target.resolve().is_relative_to(root.resolve()):
        hints = ("name a folder outside with --to, or remove --to",)
        raise UserError("the packed copy would be inside the folder of pictures", str(target), hints)
    return packing.PackRequest(root, target, size, (quality or USUAL_QUALITY) if size else 0)


def pack(
    request: packing.PackRequest, *, processes: int = 0, replaced: bool = False, progress: Callable[[int, int], None]
) -> tuple[packed.PackedSet, tuple[str, ...] | None]:
    """Packs a folder, or resumes packing. Returns (copy, unreadable pictures); (copy, None) if it was packed before."""
    contents = packing.read_contents(request.root)
    if not replaced and packing.is_up_to_date(contents, request):
        return packed.open_pack(request.target), None
    processes = processes or max(1, int(machine.cores()))
    with stops.stop_signals_as_ctrl_c():
        return packing.make_pack(contents, request, processes=processes, replace=replaced, progress=progress)


def check_pack(folder: Path, target: Path | None) -> packed.PackedSet:
    """Verifies the packed copy `target`, or else that of `folder`. Raises UserError if it is missing or altered."""
    place = target or (folder if packed.is_pack(folder) else pack_path(folder))
    if not packed.is_pack(place):
        raise UserError(f"there is no packed copy at {place}", str(place), ("run manyhands pack FOLDER",))
    pack = packed.open_pack(place)
    if bad := packed.altered_shards(pack):
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise packed.altered_error(place / bad[0], f"{bad[0]}{more} changed after packing")
    return pack
