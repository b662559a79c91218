"""manyhands pack."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from manyhands.core.terminal import say, show, show_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from manyhands.data.packed import PackedSet
    from manyhands.run.pack import PackOutcome


def pack(  # noqa: PLR0913 - one argument for each flag
    folder: Annotated[Path, Parameter(help="a folder of class folders, or one with train/ and val/")],
    /,
    *,
    size: Annotated[int, Parameter(help="shrink pictures: pixels of the shorter side; 0: keep the original size")] = 0,
    quality: Annotated[int, Parameter(help="JPEG quality of pictures that --size shrinks, 1 to 95; 0: 90")] = 0,
    to: Annotated[Path | None, Parameter(help="packed copy to write; default: FOLDER.pack, found by train")] = None,
    processes: Annotated[int, Parameter(help="parallel packing processes; 0: one per core")] = 0,
    check: Annotated[bool, Parameter(negative="", help="read an existing packed copy and verify its digests")] = False,
    replace: Annotated[bool, Parameter(negative="", help="overwrite an existing packed copy")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="print one JSON object")] = False,
) -> int:
    """Pack a folder of pictures into tar files for fast reading. An interrupted pack resumes."""
    from manyhands.run.pack import check_pack, request_of
    from manyhands.run.pack import pack as make

    folder, to = folder.expanduser(), to and to.expanduser()
    request = None if check else request_of(folder, to, size, quality)
    if request is None:
        content, lines = _checked(check_pack(folder, to))
    else:
        began = time.perf_counter()
        outcome = make(request, processes=processes, replaced=replace, progress=_Progress())
        content, lines = _packed(outcome, time.perf_counter() - began)
        lines.append(f"to train on the copy: manyhands train {shlex.quote(str(folder if to is None else to))}")
    if as_json:
        show_json(content)
    else:
        show(lines)
    return 0


def _checked(found: "PackedSet") -> tuple[dict[str, Any], list[str]]:
    return _described(found), [f"{found.folder} is intact: {_counts(found)}"]


def _packed(outcome: "PackOutcome", seconds: float) -> tuple[dict[str, Any], list[str]]:
    found = outcome.packed
    how = f", in {seconds:.1f} s" if outcome.made else " is up to date"
    content = _described(found) | {"made": outcome.made, "bad": outcome.bad}
    return content, [f"{_counts(found)}: {found.folder}{how}", *_unreadable(outcome.bad, len(found.names))]


def _unreadable(bad: "Sequence[str]", of: int) -> list[str]:
    if not bad:
        return []
    return [
        f"{len(bad):,} of {of:,} pictures can't be read: {', '.join(bad[:3])}{' …' if len(bad) > 3 else ''}",
        "repair or remove these pictures and pack again, or train with --data.skip-corrupt to skip them",
    ]


def _described(found: "PackedSet") -> dict[str, Any]:
    return {
        "pack": str(found.folder),
        "pictures": len(found.names),
        "shards": len(found.shards),
        "bytes": found.size_bytes,
        "digest": found.digest,
    }


def _counts(found: "PackedSet") -> str:
    shards = len(found.shards)
    return (
        f"{len(found.names):,} pictures in {shards:,} {'shard' if shards == 1 else 'shards'}, {_size(found.size_bytes)}"
    )


class _Progress:
    """Says how far packing is, some seconds apart."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said > 5:
            self._said = time.monotonic()
            say(f"{done:,} of {total:,} {'shard' if total == 1 else 'shards'}")


def _size(count: int) -> str:
    for unit, bytes_in in (("GB", 1e9), ("MB", 1e6)):
        if count >= bytes_in:
            return f"{count / bytes_in:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
