"""Finds the code files of a job in a folder, and copies them to other machines.

Code files are small text files. Hidden files, Python environments, run folders, links to files outside the folder, and
files with passwords or keys are skipped.
The folder's .git/config may come from another user and name programs; `core.user_code.run_git` runs none of them.
"""

import base64
import binascii
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.files import replaced_on_success
from manyhands.core.user_code import run_git

SUFFIXES = frozenset({".py", ".toml", ".yaml", ".yml", ".json", ".cfg", ".ini"})
COPIED_SUFFIXES = SUFFIXES | {".txt", ".md"}
LEFT_OUT = frozenset({"runs", "node_modules", "__pycache__", "site-packages"})
CREDENTIALS, ELSEWHERE = "may contain passwords or keys", "link to files outside the folder"
# Limits: one file (larger files are data), the code that a launcher sends, the code that an agent accepts.
FILE_BYTES, TOTAL_BYTES, CODE_BYTES = 1 << 20, 16 << 20, 32 << 20
SHOWN = 6  # names in one line

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
# Files of tokenizers have these names and hold no access tokens.
_HARMLESS = {"tokens.txt", "tokens.json", "special_tokens.json", "added_tokens.json", "special_tokens.txt"}
_HEAD_BYTES = 64 << 10


def code_files(
    folder: Path, suffixes: frozenset[str] = SUFFIXES, *, most_folders: int | None = None
) -> Iterator[tuple[Path, str]]:
    """Yields (path, "") for the code files below a folder in a fixed order, without following links to folders.

    Yields (path, reason to skip it) for files that look like credentials, or link out of the folder. If there are more
    than `most_folders` subfolders, raises UserError after the files of the first ones.
    """
    top = folder.resolve()
    for count, (place, folders, names) in enumerate(os.walk(folder)):
        if most_folders is not None and count > most_folders:
            raise UserError(f"{folder} has more than {most_folders} subfolders")
        here = Path(place)
        folders[:] = sorted(
            name
            for name in folders
            if not (name in LEFT_OUT or name.startswith(".") or (here / name / "pyvenv.cfg").exists())
            and not holds_run(here / name)
        )
        for name in sorted(names):
            path = here / name
            why = _skip_reason(path, top)
            if not why:
                named = path.suffix in suffixes and not name.startswith(".") and path.is_file()
                if not named or path.stat().st_size > FILE_BYTES or not os.access(path, os.R_OK):
                    continue  # not a code file
                why = CREDENTIALS if _contains_private_key(path) else ""
            yield path, why


def holds_run(path: Path) -> bool:
    """Returns True if a folder is the run folder of an active or ended run."""
    return (path / "job.toml").is_file() and (path / "ranks").is_dir()


def _skip_reason(path: Path, top: Path) -> str:
    """Returns the reason to skip a file, found in its name or link target; an empty string for other files."""
    if _named_like_credentials(path.name):
        return CREDENTIALS
    if not path.is_symlink():
        return ""
    real = path.resolve()
    if not real.is_relative_to(top):
        return ELSEWHERE
    return CREDENTIALS if real.name.startswith(".") or _named_like_credentials(real.name) else ""


def _named_like_credentials(name: str) -> bool:
    return name.lower() not in _HARMLESS and _NAMES.fullmatch(name) is not None


def _contains_private_key(path: Path) -> bool:
    if path.suffix == ".py":
        return False
    with path.open("rb") as file:
        return _WORDS.search(file.read(_HEAD_BYTES)) is not None


def read_code_files(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Reads the code files below a folder. Returns ({relative path: content in base64}, messages on skipped files).

    Files that git ignores are skipped too. Raises UserError if the code exceeds TOTAL_BYTES.
    """
    found, left, total = dict[str, str](), dict[str, list[str]](), 0
    listed = files_of_git(folder)
    for path, why in code_files(folder, COPIED_SUFFIXES):
        name = path.relative_to(folder).as_posix()
        if why:
            left.setdefault(why, []).append(name)
        if why or (listed is not None and path not in listed):
            continue
        total += path.stat().st_size
        if total > TOTAL_BYTES:
            hints = ("start in a folder that contains only code", "or copy the code yourself: rsync -a . n2:job/")
            raise UserError(f"{folder} has more than {TOTAL_BYTES >> 20} MiB of code", "--sync-code", hints)
        found[name] = base64.b64encode(path.read_bytes()).decode()
    notes: list[str] = []
    for why, names in left.items():
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        notes.append(f"--sync-code skips files that {why}: {shown}; if the job needs these files, copy them yourself")
    return found, notes


def with_absolute_paths(job: Job) -> Job:
    """Returns the job with absolute paths of data and checkpoint, for workers that run in a copy of this folder."""
    data, checkpoint = job.data, job.checkpoint
    changed = {
        key: str(Path(path).absolute())
        for key, path in (("name", data.name), ("held_out", data.held_out))
        if path and Path(path).is_dir()
    }
    if data.dir:
        changed["dir"] = str(Path(data.dir).expanduser().absolute())
    if Path(checkpoint.resume).exists():
        checkpoint = checkpoint.model_copy(update={"resume": str(Path(checkpoint.resume).absolute())})
    return job.model_copy(update={"data": data.model_copy(update=changed), "checkpoint": checkpoint})


def write_code(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the files of `read_code_files` into a private folder, and restores files that a job has changed there.

    Raises UserError if a path is outside the folder, a file is incomplete, or the code is too large.
    """
    contents: dict[str, bytes] = {}
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise UserError(f"the path {name!r} is outside the folder")
        try:
            contents[name] = base64.b64decode(text, validate=True)
        except binascii.Error:
            raise UserError(f"{name} is incomplete after the transfer") from None
    if sum(map(len, contents.values())) > CODE_BYTES:
        raise UserError(f"the code exceeds the limit of {CODE_BYTES >> 20} MiB")
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, folder.parent):
        place.chmod(0o700)
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != content:
            with replaced_on_success(path) as part:
                part.write_bytes(content)
    os.utime(folder)


def files_of_git(folder: Path) -> set[Path] | None:
    """Returns the files of a work tree that git tracks or would add; None if the folder has no .git or git fails."""
    with suppress(OSError, subprocess.SubprocessError):
        if (folder / ".git").exists():
            listed = run_git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
            return {folder / os.fsdecode(name) for name in listed.split(b"\0") if name}
    return None
