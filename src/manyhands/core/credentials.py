"""Files that hold passwords, tokens or keys, by their usual names and by what they begin with."""

import re
from pathlib import Path

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
