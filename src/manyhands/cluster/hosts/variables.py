"""Strict readers of launchers' environment variables, numbers, host names and addresses."""

import ipaddress
import re
from collections.abc import Iterable, Mapping

from manyhands.core.errors import UserError
from manyhands.core.files import typed_number

DEFAULT_PORT = 29500


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_host(text: str) -> bool:
    """Returns True for a valid host name or IP address."""
    if is_address(text):  # behind % Python accepts any text as the name of an interface
        return bool(re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]{1,64})?", text))
    return bool(re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?", text)) and not text.isdecimal()


def number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Reads an integer from 0; `default` if the variable is unset or empty. Raises UserError: invalid or missing."""
    text = variables.get(name, "").strip()
    if not text and default is not None:
        return default
    if (found := typed_number(text)) is None:
        message = f'{name} is not a number: "{text}"' if text else f"{name} is not set"
        raise UserError(message, "environment", (f"export {name}=0, 1, 2 …",))
    return found


def bounded_number(name: str, text: str, least: int, most: int, where: str, hint: str) -> int:
    """Parses an integer. Raises UserError: no integer from `least` to `most`."""
    found = typed_number(text)
    if found is None or not least <= found <= most:
        raise UserError(f'{name} is "{text}"; expected a number from {least} to {most}', where, (hint,))
    return found


def first_set(variables: Mapping[str, str], names: Iterable[str]) -> str:
    """Returns the name of the first variable that is set, or an empty string."""
    return next((name for name in names if variables.get(name)), "")


def master_port(variables: Mapping[str, str], default: int = DEFAULT_PORT, origin: str = "default") -> tuple[int, str]:
    """Returns MASTER_PORT or the default, with its origin. Raises UserError: MASTER_PORT is not a port."""
    text, hint = variables.get("MASTER_PORT", "").strip(), "set a valid port: export MASTER_PORT=29500"
    if not text:
        return default, origin
    return bounded_number("MASTER_PORT", text, 1, 65535, "environment", hint), "MASTER_PORT"


def master_address(variables: Mapping[str, str], *, alone: bool) -> tuple[str, str] | None:
    """Returns MASTER_ADDR, or loopback if all processes are on one machine, with its origin; None otherwise."""
    if variables.get("MASTER_ADDR"):
        return variables["MASTER_ADDR"], "MASTER_ADDR"
    return ("127.0.0.1", "all processes are on one machine") if alone else None


def derived_port(job: int) -> int:
    """Returns a port derived from a job's id: equal in all its processes, and usually different between jobs."""
    return 15000 + job % 10000  # above the well-known ports, below the ephemeral ones


def check_rank(rank: int, size: int, rank_word: str, size_word: str) -> None:
    """Raises UserError if a rank is out of range; the words name the flags or variables of rank and size."""
    if not 0 <= rank < size:
        hint = f"number the ranks from 0 to {size - 1}" if size else f"set {size_word} to the number of processes"
        raise UserError(f"{rank_word} {rank} is out of range for {size_word} {size}", rank_word, (hint,))
