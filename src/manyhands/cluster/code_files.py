"""The files of a folder that are a job's code, and what git knows of the folder.

Code is small text files, without hidden files, environments, run folders, links to files outside the folder, and files
with passwords or keys.

The .git/config of a work tree may name programs: for changes in the file system, for filters, for fetching missing
objects. It may be a stranger's, so git is asked in a way that runs none of them.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from manyhands.core.run_folder import holds_run

SUFFIXES = frozenset({".py", ".toml", ".yaml", ".yml", ".json", ".cfg", ".ini"})
LEFT_OUT = frozenset({"runs", "node_modules", "__pycache__", "site-packages"})
CREDENTIALS = "may hold passwords or keys"
ELSEWHERE = "link to files outside the folder"
# A larger file is data.
FILE_BYTES = 1 << 20

_NAMES = re.compile(
    r"""
    \.?(netrc|_netrc|pgpass|pypirc|npmrc|htpasswd|git-credentials|dockercfg)     # programs' own
    | \.?env(\..+)? | .+\.env                                                     # .env, .env.local, prod.env
    | id_(rsa|dsa|ecdsa|ed25519)(_sk)?(-cert)?([._-].*)?(?<!\.pub)                # ssh keys
    | .+\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|asc|gpg)
    | kaggle\.json
    | (.*[._-])?(credentials?|secrets?|passwords?|passwd|tokens?|api[._-]?keys?|service[._-]?accounts?)([._-].*)?
      \.(json|toml|ya?ml|ini|cfg|txt|md)
    | \.?(boto|s3cfg|rclone\.conf|auth\.json|auth\.toml|application_default_credentials\.json)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_WORDS = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|aws_secret_access_key|\"type\"\s*:\s*\"service_account\"", re.IGNORECASE
)
# Words of tokenizers, not of doors.
_HARMLESS = {"tokens.txt", "tokens.json", "special_tokens.json", "added_tokens.json", "special_tokens.txt"}
_HEAD_BYTES = 64 << 10


class TooManyFoldersError(ValueError):
    """The folder has more folders than were to be looked at."""


def code_files(
    folder: Path,
    suffixes: frozenset[str] = SUFFIXES,
    *,
    most_folders: int | None = None,
    leave: Callable[[Path, str], object] = lambda _path, _why: None,
) -> Iterator[Path]:
    """The code below a folder, in a fixed order; folders that links lead to aren't entered.

    Args:
        folder: where to look.
        suffixes: of files that are code.
        most_folders: to look at; None for all.
        leave: told of each file that is left behind, and why: CREDENTIALS or ELSEWHERE.

    Raises:
        TooManyFoldersError: there are more than `most_folders`; what was found before has been given.
    """
    top = folder.resolve()
    for count, (place, folders, names) in enumerate(os.walk(folder)):
        if most_folders is not None and count > most_folders:
            raise TooManyFoldersError
        here = Path(place)
        folders[:] = sorted(name for name in folders if not _left_out(here / name))
        for name in sorted(names):
            path = here / name
            if why := _reason_to_leave(path, top):
                leave(path, why)
            elif _is_code(path, suffixes):
                if holds_credentials(path):
                    leave(path, CREDENTIALS)
                else:
                    yield path


def _is_code(path: Path, suffixes: frozenset[str]) -> bool:
    wanted = path.suffix in suffixes and not path.name.startswith(".") and path.is_file()
    return wanted and path.stat().st_size <= FILE_BYTES and os.access(path, os.R_OK)


def _reason_to_leave(path: Path, top: Path) -> str:
    """Why a file isn't code whatever is in it, from its name and from where it really lies; empty where it may be."""
    if named_like_credentials(path.name):
        return CREDENTIALS
    if not path.is_symlink():
        return ""
    real = path.resolve()
    if not real.is_relative_to(top):
        return ELSEWHERE
    inside = real.relative_to(top)
    return CREDENTIALS if inside.name.startswith(".") or named_like_credentials(inside.name) else ""


def _left_out(folder: Path) -> bool:
    hidden = folder.name in LEFT_OUT or folder.name.startswith(".")
    return hidden or (folder / "pyvenv.cfg").exists() or holds_run(folder)


def named_like_credentials(name: str) -> bool:
    """True for a file whose name says that it opens something."""
    return name.lower() not in _HARMLESS and _NAMES.fullmatch(name) is not None


def holds_credentials(path: Path) -> bool:
    """True for a file named like credentials, and for a text, other than a program, that holds a key."""
    if named_like_credentials(path.name):
        return True
    if path.suffix == ".py":
        return False
    with path.open("rb") as file:
        return _WORDS.search(file.read(_HEAD_BYTES)) is not None


_GIT_S = 10.0
_QUIET = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never")


def revision(folder: Path) -> str:
    """Returns the short hash of a folder's commit; empty without git."""
    with suppress(OSError, subprocess.SubprocessError):
        return os.fsdecode(_git(folder, "rev-parse", "--short", "HEAD")).strip()
    return ""


def listed_files(folder: Path) -> list[Path] | None:
    """Returns the files of a work tree that git tracks or would add; None if the folder isn't one or git fails."""
    if not (folder / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        return [folder / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return None


def _git(folder: Path, *words: str) -> bytes:
    command = ["git", "-C", str(folder), *_QUIET, *words]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
    return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_S, env=environment).stdout
