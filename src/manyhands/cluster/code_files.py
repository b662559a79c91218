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

from manyhands.cluster.folders import holds_run

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
# Files of tokenizers.
_HARMLESS = {"tokens.txt", "tokens.json", "special_tokens.json", "added_tokens.json", "special_tokens.txt"}
_HEAD_BYTES = 64 << 10


class TooManyFoldersError(ValueError):
    """A folder has more subfolders than the limit of a search."""


def code_files(
    folder: Path,
    suffixes: frozenset[str] = SUFFIXES,
    *,
    most_folders: int | None = None,
    leave: Callable[[Path, str], object] = lambda _path, _why: None,
) -> Iterator[Path]:
    """Yields the code below a folder in a fixed order, without following links to folders.

    Args:
        folder: the folder to search.
        suffixes: suffixes of code files.
        most_folders: the number of folders to search; None for all.
        leave: called for each file that is left out, with the reason: CREDENTIALS or ELSEWHERE.

    Raises:
        TooManyFoldersError: there are more than `most_folders`, after the files of those.
    """
    top = folder.resolve()
    for count, (place, folders, names) in enumerate(os.walk(folder)):
        if most_folders is not None and count > most_folders:
            raise TooManyFoldersError
        here = Path(place)
        folders[:] = sorted(
            name
            for name in folders
            if not (name in LEFT_OUT or name.startswith(".") or (here / name / "pyvenv.cfg").exists())
            and not holds_run(here / name)
        )
        for name in sorted(names):
            path = here / name
            why = _reason_to_leave(path, top)
            if not why:
                named = path.suffix in suffixes and not name.startswith(".") and path.is_file()
                if not named or path.stat().st_size > FILE_BYTES or not os.access(path, os.R_OK):
                    continue  # no code
                why = CREDENTIALS if _holds_key(path) else ""
            if why:
                leave(path, why)
            else:
                yield path


def _reason_to_leave(path: Path, top: Path) -> str:
    """Returns why a file isn't code, from its name and the target of a link; empty if it may be."""
    if _named_like_credentials(path.name):
        return CREDENTIALS
    if not path.is_symlink():
        return ""
    real = path.resolve()
    if not real.is_relative_to(top):
        return ELSEWHERE
    inside = real.relative_to(top)
    return CREDENTIALS if inside.name.startswith(".") or _named_like_credentials(inside.name) else ""


def _named_like_credentials(name: str) -> bool:
    """Returns True for names of files with passwords or keys."""
    return name.lower() not in _HARMLESS and _NAMES.fullmatch(name) is not None


def _holds_key(path: Path) -> bool:
    """Returns True for a text file, other than a program, that contains a key."""
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
