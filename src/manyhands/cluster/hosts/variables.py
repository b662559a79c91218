"""Reads what a launcher wrote into the environment, strictly."""

import zlib
from collections.abc import Iterable, Mapping

from manyhands.core.errors import UserError
from manyhands.core.files import typed_number

# Ports that are derived from a job's number lie here: above the well-known ones, below those that systems hand out.
FIRST_PORT = 15000
PORTS = 10000


def number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable's whole number, from 0; the default where it is unset or empty. Raises UserError: neither is there."""
    text = variables.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text:
        raise UserError(f"{name} is not set", "environment", (f"export {name}=0, 1, 2 …",))
    if (found := typed_number(text)) is None:
        raise UserError(f'{name} is not a number: "{text}"', "environment", (f"export {name}=0, 1, 2 …",))
    return found


def port(variables: Mapping[str, str], default: int) -> int:
    """MASTER_PORT, or the default. Raises UserError: it is no port."""
    text = variables.get("MASTER_PORT", "").strip() or str(default)
    if not 0 < (found := typed_number(text) or 0) < 65536:
        what = f'MASTER_PORT is "{text}"; expected 1 … 65535'
        raise UserError(what, "environment", ("set a valid port: export MASTER_PORT=29500",))
    return found


def port_from_name(name: str) -> int:
    """A port that is the same for all processes of a job, and mostly another one for another job."""
    return FIRST_PORT + zlib.crc32(name.encode()) % PORTS


def check_rank(rank: int, size: int, rank_word: str, size_word: str) -> None:
    """Raises UserError where a rank is outside its group; both are named by the words that the user wrote them with."""
    if not 0 <= rank < size:
        what = f"{rank_word} {rank} is out of range for {size_word} {size}"
        hints = (
            (f"number the ranks from 0 to {size - 1}",) if size else (f"set {size_word} to the number of processes",)
        )
        raise UserError(what, rank_word, hints)


def first_set(variables: Mapping[str, str], names: Iterable[str]) -> str:
    """The first of these variables that is set, or an empty string."""
    return next((name for name in names if variables.get(name)), "")
