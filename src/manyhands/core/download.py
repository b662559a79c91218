"""Downloads a file, verifies its checksum and leaves no partial file. Times out if the server does not answer."""

import base64
import hashlib
import http.client
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from socket import getaddrinfo
from typing import NamedTuple

from manyhands.core.files import temporary_path

PATIENCE_S = 5.0


class Digest(NamedTuple):
    """The expected digest of a file: the hash function, and the first hexadecimal digits of the digest."""

    function: str
    begin: str


def download(url: str, into: Path, digest: Digest | None) -> str:
    """Downloads a file. Returns an error message, or "" on success. Redirects don't get the URL's password."""
    try:
        parts = urllib.parse.urlsplit(url)
        user, at, server = parts.netloc.rpartition("@")
        address = parts._replace(netloc=server)
        if address.hostname is None or (address.port or 1) < 1 or "@" in address.geturl():
            raise ValueError
        if not _can_resolve_host(address):
            return "the server's name can't be resolved on this machine (no network?)"
    except ValueError:  # its message may contain the password
        return "invalid URL; in a user name or password write / as %2F, # as %23, ? as %3F, @ as %40, : as %3A"
    try:
        request = urllib.request.Request(address.geturl(), headers={"User-Agent": "manyhands"})
    except ValueError as error:
        return str(error)
    if at:  # an unredirected header goes to this server alone
        words = urllib.parse.unquote(user if ":" in user else f"{user}:")
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(words.encode()).decode()}")
    content = hashlib.new(digest.function if digest else "md5", usedforsecurity=False)
    with temporary_path(into) as part:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer, part.open("wb") as file:
                while block := answer.read(1 << 20):
                    content.update(block)
                    file.write(block)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(getattr(error, "reason", "") or error) or type(error).__name__
        found = content.hexdigest()
        if digest and not found.startswith(digest.begin):
            name = {"md5": "MD5", "sha256": "SHA-256"}[digest.function]
            return f"the {name} checksum of the download is {found[: len(digest.begin)]}, expected {digest.begin}"
        part.replace(into)
    return ""


def without_password(url: str) -> str:
    scheme, slashes, rest = url.partition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"


def _can_resolve_host(address: urllib.parse.SplitResult) -> bool:
    """Returns True if the host's name is resolved within PATIENCE_S (the system may take a minute) or by a proxy."""
    if urllib.request.getproxies().get(address.scheme):
        return True
    found: list[bool] = []

    def look_up() -> None:
        try:
            port = address.port or {"http": 80, "https": 443}.get(address.scheme, 80)
            found.append(bool(getaddrinfo(address.hostname, port)))
        except (OSError, UnicodeError):
            return

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return bool(found)
