"""Announces user code that a run folder or a plan, possibly another user's, names, before the code runs."""

import os
from collections.abc import Iterable
from pathlib import Path

from manyhands.checkpoint.trained import TrainedNetwork
from manyhands.core import terminal, user_code
from manyhands.core.errors import UserError


def announce(
    words: Iterable[str], said_by: Path, record: TrainedNetwork | None, instead: str, *, compared: bool = True
) -> None:
    """Prints which code a run is about to execute and, with `compared`, whether the code changed since training.

    `words`: option values; values that aren't code are skipped. `said_by`: folder or file with the values. `record`:
    has digests of the trained code. `instead`: how a user names the code. Raises UserError: another user owns it.
    """
    known = record.code if record else {}
    for word in dict.fromkeys(words):
        file = user_code.code_file(word)
        if file is None or not file.is_file():
            continue
        for place in (said_by, file):
            refuse_other_users(word, place, said_by, instead.format(word))
        digests = user_code.code_digests([word])
        unchanged = word in digests and all(known.get(name, digest) == digest for name, digest in digests.items())
        trained = "; unchanged since training" if unchanged else "; CHANGED since training"
        if word not in known:
            trained = "; the version used in training is unknown"
        terminal.say(f"running code from {file}, as {said_by} requests{trained if compared else ''}")


def refuse_other_users(word: str, place: Path, said_by: Path, instead: str) -> None:
    """Raises UserError if `place`, from which `word` would run, belongs neither to this user nor to root."""
    if place.exists() and (owner := place.stat().st_uid) not in {0, os.geteuid()}:
        what = f"{said_by} requests to run {word}, but {place} belongs to another user (uid {owner})"
        raise UserError(what, str(place), (f"review {word}, then name it explicitly: {instead}",))
