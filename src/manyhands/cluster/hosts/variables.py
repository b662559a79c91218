"""Strict readers of launchers' environment variables."""

import zlib
from collections.abc import Iterable, Mapping

from manyhands.core.errors import UserError
from manyhands.core.files import typed_number

# Ports that are derived from a job's number lie here: above the well-known ones, below those that systems hand out.
FIRST_PORT = 15000
PORTS = 10000
DEFAULT_PORT = 29500


def number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Reads a whole number from 0; the default if it is unset or empty. Raises UserError: not a number, or missing."""
    text = variables.get(name, "").strip()
    if not text and default is not None:
        return default
    if (found := typed_number(text)) is None:
        message = f'{name} is not a number: "{text}"' if text else f"{name} is not set"
        raise UserError(message, "environment", (f"export {name}=0, 1, 2 …",))
    return found


def bounded_number(name: str, text: str, least: int, most: int, where: str, hint: str) -> int:
    """Reads a number. Raises UserError: not a number, or not from `least` to `most`."""
    found = typed_number(text)
    if found is None or not least <= found <= most:
        raise UserError(f'{name} is "{text}"; expected a number from {least} to {most}', where, (hint,))
    return found


def master_port(variables: Mapping[str, str], default: int, origin: str) -> tuple[int, str]:
    """Returns MASTER_PORT or the default, with its origin. Raises UserError: MASTER_PORT is not a port."""
    text = variables.get("MASTER_PORT", "").strip()
    if not text:
        return default, origin
    if not 0 < (found := typed_number(text) or 0) < 65536:
        message = f'MASTER_PORT is "{text}"; expected 1 … 65535'
        raise UserError(message, "environment", ("set a valid port: export MASTER_PORT=29500",))
    return found, "MASTER_PORT"


def master_address(variables: Mapping[str, str], *, alone: bool) -> tuple[str, str] | None:
    """Returns MASTER_ADDR, or loopback if all processes are on one machine, with its origin; None otherwise."""
    if variables.get("MASTER_ADDR"):
        return variables["MASTER_ADDR"], "MASTER_ADDR"
    return ("127.0.0.1", "all processes are on one machine") if alone else None


def port_from_name(name: str) -> int:
    """Returns a port that is the same for all processes of a job and usually differs between jobs."""
    return FIRST_PORT + zlib.crc32(name.encode()) % PORTS


def check_rank(rank: int, size: int, rank_word: str, size_word: str) -> None:
    """Raises UserError for a rank outside its group. The words name the flags or variables of rank and size."""
    if not 0 <= rank < size:
        message = f"{rank_word} {rank} is out of range for {size_word} {size}"
        hints = (
            (f"number the ranks from 0 to {size - 1}",) if size else (f"set {size_word} to the number of processes",)
        )
        raise UserError(message, rank_word, hints)


def first_set(variables: Mapping[str, str], names: Iterable[str]) -> str:
    """Returns the name of the first variable that is set, or an empty string."""
    return next((name for name in names if variables.get(name)), "")
