"""Fetches published files of data sets: once for each host, checked, and never half."""

import os
import time
from pathlib import Path

from manyhands.core.download import Digest, download, without_password
from manyhands.core.errors import UserError
from manyhands.core.once import one_at_a_time


def fetch(name: str, urls: tuple[str, ...], md5: str, into: Path) -> Path:
    """Fetches a file such as "mnist/train-images-idx3-ubyte.gz", unless it is there.

    Processes of one host take turns; those that waited find the file, or learn that the attempt failed without trying
    again. MANYHANDS_MIRROR names a server that is asked instead of `urls`, which are tried in order; its files lie as
    `name` says. Raises UserError: no attempt succeeded; says what was tried and where to put the file by hand.
    """
    began = time.time()
    mirror = os.environ.get("MANYHANDS_MIRROR", "")
    tried: list[str] = []
    failure = into.with_name(f".{into.name}.failed")
    with one_at_a_time(into):
        if into.is_file():
            return into
        if failure.is_file() and failure.stat().st_mtime >= began:
            raise _unfetched(name, into, failure.read_text(encoding="utf-8").splitlines())
        for url in (f"{mirror.rstrip('/')}/{name}",) if mirror else urls:
            problem = download(url, into, Digest("md5", md5))
            if not problem:
                failure.unlink(missing_ok=True)
                return into
            tried.append(f"{without_password(url)}: {problem}")
        failure.write_text("\n".join(tried), encoding="utf-8")
    raise _unfetched(name, into, tried)


def _unfetched(name: str, into: Path, tried: list[str]) -> UserError:
    mend = (
        *(f"tried {line}" for line in tried),
        f"put {into.name} into {into.parent} by hand,",
        f"or name the folder that holds {name.partition('/')[0]}/: --data-dir DIR, or MANYHANDS_DATA",
    )
    return UserError(f"{name} can't be fetched", str(into), mend)
