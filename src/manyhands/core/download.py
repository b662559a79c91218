"""Fetches a file over the network: checked, never half, and given up after seconds where nobody answers."""

import base64
import hashlib
import http.client
import threading
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from socket import getaddrinfo

from manyhands.core.once import temporary

PATIENCE_S = 5.0
_BLOCK_BYTES = 1 << 20
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Digest:
    """What a file's content is known by: the name of a hash function, and the first digits of its value."""

    function: str
    begin: str


def download(url: str, into: Path, digest: Digest | None) -> str:
    """Fetches one file.

    A user and a password in the address (https://user:password@server/) are sent to that server as HTTP's basic
    authorization, and never said.

    Returns:
        What went wrong, or an empty string.
    """
    try:
        address, authorization = _apart(url)
        if not _resolves(address):
            return "the server's name can't be resolved on this machine (no network?)"
    except ValueError:  # the error's message may contain the password
        return "invalid URL; in a user name or password write / as %2F, # as %23, ? as %3F, @ as %40, : as %3A"
    with temporary(into) as part:
        try:
            found = _receive(address, authorization, part, digest.function if digest else "md5")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(getattr(error, "reason", "") or error) or type(error).__name__
        if digest and not found.startswith(digest.begin):
            name = {"md5": "MD5", "sha256": "SHA-256"}[digest.function]
            return f"the {name} checksum of the download is {found[: len(digest.begin)]}, expected {digest.begin}"
        part.replace(into)
    return ""


def without_password(url: str) -> str:
    """An address as it may be shown and kept: what stands before its server's name is left out."""
    scheme, slashes, rest = url.partition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"


def _apart(url: str) -> tuple[str, str]:
    """The address without user and password, and the header's value that they make, or an empty string.

    Raises:
        ValueError: it isn't an address.
    """
    parts = urllib.parse.urlsplit(url)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    if address.hostname is None or (address.port or 1) < 1 or "@" in address.geturl():
        raise ValueError
    if parts.username is None:
        return address.geturl(), ""
    words = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    return address.geturl(), f"Basic {base64.b64encode(words.encode()).decode()}"


def _receive(address: str, authorization: str, part: Path, function: str) -> str:
    """Writes what the server sends to a file; its digest in hexadecimal."""
    digest = hashlib.new(function, usedforsecurity=False)
    request = urllib.request.Request(address, headers={"User-Agent": "manyhands"})
    if authorization:
        request.add_unredirected_header("Authorization", authorization)  # for this server alone
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer, part.open("wb") as file:
        while block := answer.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def _resolves(address: str) -> bool:
    """Looks the server's name up, and gives up after a few seconds (the system's own limit can be a minute)."""
    parts = urllib.parse.urlsplit(address)
    if urllib.request.getproxies().get(parts.scheme):
        return True
    found: list[bool] = []

    def look_up() -> None:
        try:
            found.append(bool(getaddrinfo(parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme, 80))))
        except (OSError, UnicodeError):
            return

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return bool(found)
