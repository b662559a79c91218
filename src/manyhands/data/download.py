"""Fetches published files: once for each host, checked, and never half."""

import hashlib
import http.client
import os
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from socket import getaddrinfo

from manyhands.core.errors import UserError
from manyhands.data.once import one_at_a_time, temporary

_TIMEOUT_S = 5.0
_BLOCK = 1 << 20


def fetch(name: str, urls: tuple[str, ...], md5: str, into: Path) -> Path:
    """Fetches a file, unless it is there.

    Processes of one host take turns; those that waited find the file, or learn that the attempt failed without
    trying again. MANYHANDS_MIRROR names a server that is asked instead of `urls`; its files lie as `name` says.

    Args:
        name: data set and file, "mnist/train-images-idx3-ubyte.gz".
        urls: where it is published; tried in order.
        md5: the published checksum.
        into: where to keep it.

    Raises:
        UserError: no attempt succeeded; says what was tried and where to put the file by hand.
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
            problem = _attempt(url, md5, into)
            if not problem:
                failure.unlink(missing_ok=True)
                return into
            tried.append(f"{url}: {problem}")
        failure.write_text("\n".join(tried), encoding="utf-8")
    raise _unfetched(name, into, tried)


def _attempt(url: str, md5: str, into: Path) -> str:
    """Fetches from one address; returns what went wrong, or an empty string."""
    if not _resolves(url):
        return "the server's name is not known here (no network?)"
    with temporary(into) as part:
        try:
            found = _receive(url, part)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(getattr(error, "reason", "") or error) or type(error).__name__
        if found != md5:
            return f"the checksum of what came is {found}, not {md5}"
        part.replace(into)
    return ""


def _receive(url: str, part: Path) -> str:
    """Writes what the server sends to a file; its md5 in hexadecimal."""
    digest = hashlib.md5(usedforsecurity=False)
    request = urllib.request.Request(url, headers={"User-Agent": "manyhands"})
    # The addresses are this package's own, or the mirror that the user named.
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer, part.open("wb") as file:
        while block := answer.read(_BLOCK):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def _resolves(url: str) -> bool:
    """Looks the server's name up, and gives up after a few seconds (the system's own limit can be a minute)."""
    parts = urllib.parse.urlsplit(url)
    if urllib.request.getproxies().get(parts.scheme):
        return True
    found: list[bool] = []

    def look_up() -> None:
        try:
            found.append(bool(getaddrinfo(parts.hostname, parts.port or 80)))
        except OSError:
            return

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return bool(found)


def _unfetched(name: str, into: Path, tried: list[str]) -> UserError:
    mend = (
        *(f"tried {line}" for line in tried),
        f"put {into.name} into {into.parent} by hand,",
        f"or name the folder that holds {name.partition('/')[0]}/: --data-dir DIR, or MANYHANDS_DATA",
    )
    return UserError(f"{name} can't be fetched", str(into), mend)
