"""torchvision's published weights: looked up in torch hub's cache, or downloaded there once."""

import hashlib
import os
import pickle
import re
import socket
import threading
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import torch
from filelock import FileLock

from manyhands.core.errors import UserError

TIMEOUT_S = 5.0
_CHUNK_BYTES = 1 << 20
# torchvision's file names end in the first digits of their SHA-256.
_DIGEST = re.compile(r"-([0-9a-f]{8,})\.")


def fetch_weights(url: str) -> Path:
    """Makes sure that torch hub's cache has the file of this address, and that it holds tensors only.

    Processes of one machine that ask at once download it once.

    Raises:
        UserError: it isn't there and can't be had, or holds something else.
    """
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.is_file():
                _download(url, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle protocol that torch itself doesn't write
            torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path.name} is damaged, or holds more than weights", str(path), _mend(url, path)) from error
    return path


def _download(url: str, path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _refuse_unknown_host(url)
        digest = _stream(url, part)
        expected = _DIGEST.search(path.name)
        if expected and not digest.startswith(expected[1]):
            raise OSError(f"its SHA-256 begins with {digest[:8]}, expected {expected[1]}")
        part.replace(path)
    except OSError as error:  # urllib's errors and time-outs are among them
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{path.name} can't be downloaded: {reason}", url, _mend(url, path)) from error
    finally:
        part.unlink(missing_ok=True)


def _stream(url: str, part: Path) -> str:
    """Downloads to a file; returns its SHA-256 in hex."""
    digest = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, part.open("wb") as file:
        while chunk := answer.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _refuse_unknown_host(url: str) -> None:
    """Looks the host up, but not for longer than the time-out, which a resolver without network takes no heed of."""
    host = urlsplit(url).hostname or ""
    found: list[object] = []

    def look_up() -> None:
        try:
            found.extend(socket.getaddrinfo(host, None))
        except OSError:
            return

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if not found and not urllib.request.getproxies():
        raise urllib.error.URLError(f"{host} can't be found; is there a network?")


def _mend(url: str, path: Path) -> tuple[str, ...]:
    return (f"with a browser get {url}", f"and put it at {path}", "or leave model.pretrained out")
