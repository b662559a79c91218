"""Code files that a run or a plan names: what is said before one of them runs, and whose words aren't taken for it.

What the user names on the command line runs without a word; a run folder may be a stranger's.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.core.plugins import code_digest, code_file
from manyhands.core.shown import say
from manyhands.core.trained import TrainedNetwork

# Files of the system's are as trusted as its programs.
_SYSTEM = 0


def announce(words: Iterable[str], said_by: Path, record: TrainedNetwork | None, instead: str) -> None:
    """Says which code is about to run because a run names it, and whether it is what the run was trained with.

    Args:
        words: the run's own, such as net.py:Net; those that name no code are passed over.
        said_by: the folder or file that names them.
        record: has the digests of what it was trained with; None where nobody knows.
        instead: how the user names the code on the command line.

    Raises:
        UserError: the folder or the code is another user's.
    """
    for word, file in _files(words, said_by, instead):
        known = record.code.get(word) if record else None
        trained = "unchanged since training" if known == code_digest(file) else "CHANGED since training"
        if known is None:
            trained = "the version used in training is unknown"
        say(f"running code from {file}, as {said_by} requests; {trained}")


def announce_planned(word: str, plan: Path, instead: str) -> None:
    """Says which code is about to run because a plan.json names it; whether it has changed its digest tells.

    Raises:
        UserError: the plan or the code is another user's.
    """
    for _, file in _files([word], plan, instead):
        say(f"running code from {file}, as {plan} requests")


def _files(words: Iterable[str], said_by: Path, instead: str) -> Iterator[tuple[str, Path]]:
    """Words that name code that is here, and its files; see `announce`."""
    for word in dict.fromkeys(words):
        file = code_file(word)
        if file is None or not file.is_file():
            continue
        for place in (said_by, file):
            refuse_other_users(word, place, said_by, instead.format(word))
        yield word, file


def refuse_other_users(word: str, place: Path, said_by: Path, instead: str) -> None:
    """Raises UserError where a file or folder that makes `word` run belongs to another user."""
    if place.exists() and (owner := place.stat().st_uid) not in {_SYSTEM, os.geteuid()}:
        what = f"{said_by} requests to run {word}, but {place} belongs to another user (uid {owner})"
        raise UserError(what, str(place), (f"check {word}, then name it yourself: {instead}",))
