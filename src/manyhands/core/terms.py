"""Which head of a run a machine obeys: the one of the highest term, which stands in the run folder there.

Each new head of a detached run counts the term up, and under one head its starts are counted. Agents that work for
less than what stands there have their processes save, and leave.
"""

from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from manyhands.core.private import private_files
from manyhands.core.records import write_atomic


class Term(NamedTuple):
    """Greater is obeyed; of no head, before the first."""

    head: int = 0
    start: int = 0


def term_in(ranks: Path) -> Term:
    """What stands in the folder ranks/ of a run."""
    try:
        head, start = map(int, (ranks / "term").read_text("ascii").split())
    except (OSError, ValueError):
        return Term()
    return Term(head, start)


def raise_term(ranks: Path, wanted: Term) -> Term:
    """Writes a term, unless a higher one stands there; gives what stands there now."""
    ranks.mkdir(parents=True, exist_ok=True)
    with private_files(), FileLock(ranks / "term.lock", mode=0o600):
        found = term_in(ranks)
        if wanted > found:
            write_atomic(ranks / "term", f"{wanted.head} {wanted.start}", durable=True)
        return max(wanted, found)
